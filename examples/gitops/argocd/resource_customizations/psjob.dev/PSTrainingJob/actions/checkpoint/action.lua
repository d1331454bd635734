-- Another number than the one before asks a running job for a checkpoint; the time in seconds is one.
local os = require("os")
if obj.spec.checkpoint == nil then
  obj.spec.checkpoint = {}
end
local before = obj.spec.checkpoint.request or 0
local now = os.time()
if now <= before then
  now = before + 1
end
obj.spec.checkpoint.request = now
return obj
