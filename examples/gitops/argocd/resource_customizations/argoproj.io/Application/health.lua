-- Health of an Application: what Argo CD wrote to its status. Argo CD has none of its own, so a sync wave would not wait for one.
local health = (obj.status or {}).health or {}
return {status = health.status or "Progressing", message = health.message or ""}
