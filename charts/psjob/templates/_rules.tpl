{{- /* What the operator does in every namespace it serves; tests compare it with the audit log of real runs. */ -}}
{{- define "psjob.rules" -}}
- apiGroups: [psjob.dev]
  resources: [pstrainingjobs]
  verbs: [get, list, watch, delete] # delete: ttlSecondsAfterFinished
- apiGroups: [psjob.dev]
  resources: [pstrainingjobs/status]
  verbs: [patch]
- apiGroups: [psjob.dev]
  resources: [pstrainingjobs/finalizers] # asked for by clusters that guard blockOwnerDeletion; never called
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, delete, get, list, watch]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [create, get, list, watch, patch]
- apiGroups: [""]
  resources: [secrets] # the keys of each run: made once, never read, changed or deleted
  verbs: [create]
- apiGroups: [""]
  resources: [persistentvolumeclaims] # made once, never changed or deleted
  verbs: [create, get, list, watch]
- apiGroups: [""]
  resources: [events, limitranges] # why a pod or a claim is stuck or refused
  verbs: [list]
{{- if .Values.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io] # who may reach the pods of each run
  resources: [networkpolicies]
  verbs: [create, get, list, watch, patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- with .Values.rbac.extraRules }}
{{ toYaml . }}
{{- end }}
{{- end -}}
