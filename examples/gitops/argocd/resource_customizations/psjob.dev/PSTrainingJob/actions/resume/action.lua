-- The job continues from its last checkpoint. The field goes, so that nothing differs from a manifest that leaves it out.
obj.spec.suspend = nil
return obj
