{{- define "psjob.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "psjob.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* ClusterRoles have no namespace, so two releases of one name would share them. */ -}}
{{- define "psjob.clusterName" -}}
{{- printf "%s:%s" (include "psjob.namespace" .) (include "psjob.fullname" .) -}}
{{- end -}}

{{- define "psjob.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* Not for pod templates: helm.sh/chart would restart the operator at each chart version. */ -}}
{{- define "psjob.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "psjob.selectorLabels" . }}
app.kubernetes.io/part-of: psjob
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* What an object has of its own, over what all objects have, as YAML, or nothing: (list .Values.podLabels .Values.commonLabels) */ -}}
{{- define "psjob.merged" -}}
{{- with merge (deepCopy (first . | default dict)) (last . | default dict) }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "psjob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "psjob.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* Who shards are where the job names nobody: OpenShift gives each namespace numbers of its own and refuses others. */ -}}
{{- define "psjob.shardUser" -}}
{{- if not (kindIs "string" .Values.shardUser) -}}
{{- int64 .Values.shardUser -}}
{{- else if ne .Values.shardUser "auto" -}}
{{- .Values.shardUser -}}
{{- else if .Capabilities.APIVersions.Has "security.openshift.io/v1" -}}
namespace
{{- else -}}
65532
{{- end -}}
{{- end -}}

{{- /* Who may reach the status port of shards: the operator's pods, and whom values add. */ -}}
{{- define "psjob.statusPeers" -}}
{{- $home := dict "matchLabels" (dict "kubernetes.io/metadata.name" (include "psjob.namespace" .)) -}}
{{- $pods := dict "matchLabels" (include "psjob.selectorLabels" . | fromYaml) -}}
{{- prepend .Values.networkPolicy.statusFrom (dict "namespaceSelector" $home "podSelector" $pods) | toJson -}}
{{- end -}}

{{- /* Reference of an image: (dict "image" .Values.image "version" .Chart.AppVersion) */ -}}
{{- define "psjob.image" -}}
{{- with .image.registry }}{{ . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .version .image.tag }}{{ end -}}
{{- end -}}

{{- /* Ends a filter of `restricted` (jobpolicy.yaml): under baseline what a worker's template says by itself is left to that level. */ -}}
{{- define "psjob.policy.judged" -}}
{{- if ne .Values.jobPolicy "restricted" }} && c.at.startsWith('spec.shards.'){{ end -}}
{{- end -}}
