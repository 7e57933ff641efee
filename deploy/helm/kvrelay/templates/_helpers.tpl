{{- define "kvrelay.name" -}}
{{- if contains "kvrelay" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-kvrelay" .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* Labels by which services and policies find pods. Called with (list root component). */}}
{{- define "kvrelay.selector" -}}
app.kubernetes.io/name: kvrelay
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "kvrelay.labels" -}}
{{ include "kvrelay.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvrelay
{{- end -}}

{{/* Internal addresses of all routers, as an instance registers with each of them. */}}
{{- define "kvrelay.routers" -}}
{{- $name := include "kvrelay.name" . -}}
{{- $addresses := list -}}
{{- range $i := until (int .Values.router.replicas) -}}
{{- $addresses = append $addresses (printf "%s-router-%d.%s-internal:50052" $name $i $name) -}}
{{- end -}}
{{ join "," $addresses }}
{{- end -}}

{{- define "kvrelay.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvrelay.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvrelay.environment" -}}
- name: KVRELAY_CLUSTER_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.clusterToken.secretName }}
      key: {{ .Values.clusterToken.key }}
- name: XDG_CACHE_HOME
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
{{- end -}}

{{- define "kvrelay.mounts" -}}
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
{{- if .Values.modelVolume.claimName }}
- name: models
  mountPath: {{ .Values.modelVolume.mountPath }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* Called with (list root size-of-the-cache). */}}
{{- define "kvrelay.volumes" -}}
{{- $root := index . 0 -}}
- name: cache
  emptyDir:
    sizeLimit: {{ index . 1 }}
- name: tmp
  emptyDir:
    sizeLimit: 256Mi
{{- if $root.Values.modelVolume.claimName }}
- name: models
  persistentVolumeClaim:
    claimName: {{ $root.Values.modelVolume.claimName }}
    readOnly: true
{{- end }}
{{- end -}}

{{/* Where pods of this kind may run, and with what. Called with their values. */}}
{{- define "kvrelay.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
