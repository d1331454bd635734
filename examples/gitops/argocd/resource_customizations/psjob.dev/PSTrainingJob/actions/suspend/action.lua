-- The job takes a checkpoint, and then its pods end.
obj.spec.suspend = true
return obj
