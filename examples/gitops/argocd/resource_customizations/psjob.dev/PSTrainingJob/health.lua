-- Health of a PSTrainingJob. Its status follows kstatus: observedGeneration, and the conditions Ready, Reconciling and Stalled.
-- A job that trains is Healthy, so that a sync does not wait for the end of training. Set this to true where it should wait:
local until_complete = false

local status = obj.status or {}
local said = {}
for _, condition in ipairs(status.conditions or {}) do
  said[condition.type] = condition
end

local function holds(kind)
  return said[kind] ~= nil and said[kind].status == "True"
end

local function health(name, kind)
  return {status = name, message = said[kind].message or ""}
end

if status.observedGeneration == nil or status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "waiting for the psjob operator to read this spec"}
end
if holds("Stalled") then
  return health("Degraded", "Stalled")
end
if holds("Suspended") then
  return health("Suspended", "Suspended")
end
if holds("Complete") then
  return health("Healthy", "Complete")
end
if holds("Ready") and not holds("Reconciling") and not until_complete then
  return health("Healthy", "Ready")
end
if said["Ready"] ~= nil then
  return health("Progressing", "Ready")
end
return {status = "Progressing", message = "waiting for the psjob operator"}
