-- Actions on a PSTrainingJob: suspend and resume while it has not ended, checkpoint while it trains.
local status = obj.status or {}
local over = status.phase == "Complete" or status.phase == "Failed"
local suspended = obj.spec.suspend == true
local kept = not (obj.spec.checkpoint ~= nil and obj.spec.checkpoint.disabled == true)

local actions = {}
actions["suspend"] = {["disabled"] = over or suspended, ["iconClass"] = "fa fa-fw fa-pause"}
actions["resume"] = {["disabled"] = over or not suspended, ["iconClass"] = "fa fa-fw fa-play"}
actions["checkpoint"] = {["disabled"] = suspended or not kept or status.phase ~= "Running", ["iconClass"] = "fa fa-fw fa-save"}
return actions
