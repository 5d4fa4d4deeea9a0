{{/* Parts of the Pod templates that head and workers share. */}}

{{/* (list . component podLabels) */}}
{{- define "tetris-serve.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "tetris-serve.selectorLabels" $root }}
app.kubernetes.io/component: {{ index . 1 }}
{{- with merge (dict) (index . 2 | default dict) $root.Values.podLabels $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (list . podAnnotations); empty if there are none */}}
{{- define "tetris-serve.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- with merge (dict) (index . 1 | default dict) $root.Values.podAnnotations $root.Values.commonAnnotations -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{/* Where the Pod goes and as whom it runs: (list . spec) */}}
{{- define "tetris-serve.scheduling" -}}
{{- $root := index . 0 -}}
{{- $spec := index . 1 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $spec.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $spec.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/*
The last of those that agree in a field, for the API server refuses such lists:
(list "field" items).
*/}}
{{- define "tetris-serve.lastOfEach" -}}
{{- $field := index . 0 -}}
{{- $seen := dict -}}
{{- $kept := list -}}
{{- range reverse (index . 1) -}}
{{- if not (hasKey $seen (index . $field)) -}}
{{- $_ := set $seen (index . $field) true -}}
{{- $kept = prepend $kept . -}}
{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{/* Environment of a Ray container: (list . extraEnv) */}}
{{- define "tetris-serve.env" -}}
{{- $root := index . 0 -}}
{{- $own := include "tetris-serve.ownEnv" $root | fromYamlArray -}}
{{- include "tetris-serve.lastOfEach" (list "name" (concat $own $root.Values.extraEnv (index . 1 | default list))) -}}
{{- end -}}

{{- define "tetris-serve.ownEnv" -}}
{{- $root := . -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# As `tetris-serve up` has them: HAProxy before the fronts, which stay for streams of an
# hour and for the seconds in which HAProxy hears that they leave, another front for what
# one that dies has not begun to answer; fewer threads on a request's way, cheaper
# streams between replicas, room for long replies, a dead proxy found out in seconds.
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
- name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
  value: "3600"
- name: RAY_SERVE_HAPROXY_RETRY_ON
  value: conn-failure empty-response
- name: RAY_SERVE_HAPROXY_RETRIES
  value: "4"
- name: RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT
  value: "1"
- name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
  value: "5"
- name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD
  value: "0"
- name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP
  value: "0"
- name: RAY_SERVE_USE_GRPC_BY_DEFAULT
  value: "1"
- name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH
  value: "536870912"
- name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S
  value: "1"
{{- if eq $root.Values.ray.auth.mode "disabled" }}
- name: RAY_AUTH_MODE
  value: disabled
{{- end }}
{{- if $root.Values.serve.tracing.enabled }}
- name: OTEL_SERVICE_NAME
  value: {{ include "tetris-serve.fullname" $root }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $root.Values.serve.tracing.endpoint | quote }}
{{- end }}
{{- range $name, $secret := $root.Values.secretEnv }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret.name }}
      key: {{ $secret.key }}
{{- end }}
{{- end -}}

{{/* (list . extraVolumes shmSize component) */}}
{{- define "tetris-serve.volumes" -}}
{{- $own := include "tetris-serve.ownVolumes" . | fromYamlArray -}}
{{- include "tetris-serve.lastOfEach" (list "name" (concat $own (index . 0).Values.extraVolumes (index . 1 | default list))) -}}
{{- end -}}

{{/*
What a read-only root file system needs. KubeRay adds ray-logs by itself, but only to a head
that autoscales; collectors of logs want it always. The head runs no engine, so it
has no use for the cache, and would fight the workers for a claim of ReadWriteOnce.
Only a model in there has to be seen by it, put there by hand or made by the Job: it
checks the settings.
*/}}
{{- define "tetris-serve.ownVolumes" -}}
{{- $root := index . 0 -}}
{{- $wantsCache := or (eq (index . 3) "worker") (include "tetris-serve.hasModelInCache" $root) (include "tetris-serve.headWaits" $root) -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: ray-logs
  emptyDir: {}
- name: shared-mem
  emptyDir:
    medium: Memory
    sizeLimit: {{ index . 2 }}
{{- with include "tetris-serve.keysSecret" $root }}
- name: api-keys
  secret:
    secretName: {{ . }}
    # Hashes alone; the key itself stays in the Secret.
    items: [{key: keys.json, path: keys.json}]
{{- end }}
- name: model-cache
  {{- if and $root.Values.modelCache.enabled $wantsCache }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "tetris-serve.fullname" $root)) $root.Values.modelCache.existingClaim }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}

{{/* (list . extraVolumeMounts) */}}
{{- define "tetris-serve.volumeMounts" -}}
{{- $own := include "tetris-serve.ownVolumeMounts" . | fromYamlArray -}}
{{- include "tetris-serve.lastOfEach" (list "mountPath" (concat $own (index . 0).Values.extraVolumeMounts (index . 1 | default list))) -}}
{{- end -}}

{{- define "tetris-serve.ownVolumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: ray-logs
  mountPath: /tmp/ray
- name: home
  mountPath: /home/tetris
- name: shared-mem
  mountPath: /dev/shm
- name: model-cache
  mountPath: /var/cache/tetris
{{- if include "tetris-serve.keysSecret" (index . 0) }}
# A folder, for a single file would not follow the Secret.
- name: api-keys
  mountPath: /etc/tetris-serve/keys
  readOnly: true
{{- end }}
{{- end -}}

{{/* The Ray container without ports, probes and resources: (list . name extraEnv extraVolumeMounts) */}}
{{- define "tetris-serve.container" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
image: {{ include "tetris-serve.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
env:
  {{- include "tetris-serve.env" (list $root (index . 2)) | nindent 2 }}
{{- with $root.Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.securityContext | nindent 2 }}
volumeMounts:
  {{- include "tetris-serve.volumeMounts" (list $root (index . 3)) | nindent 2 }}
{{- end -}}

{{/*
Ray's agent answers for the node, on the head for GCS too. Workers are ready when their
HTTP proxy is, which is when Serve runs on them and they are not being drained. With these
two the image needs no wget, which KubeRay's own probe for workers calls.
*/}}
{{- define "tetris-serve.livenessProbe" -}}
httpGet: {path: /api/healthz, port: 52365}
{{ toYaml .Values.probes.liveness }}
{{- end -}}

{{- define "tetris-serve.startupProbe" -}}
httpGet: {path: /api/healthz, port: 52365}
periodSeconds: 5
timeoutSeconds: 5
failureThreshold: {{ divf .Values.probes.startupSeconds 5 | ceil }}
{{- end -}}

{{/*
Ray's dashboard shows Grafana's panels if it knows both addresses. Its page Metrics embeds
two whole dashboards; the second, meant for Ray Data, which nothing here uses, is ours.
*/}}
{{- define "tetris-serve.dashboardEnv" -}}
{{- with .Values.monitoring.grafana }}
- name: RAY_GRAFANA_HOST
  value: {{ default "DISABLED" .host | quote }}
{{- if .host }}
- name: RAY_GRAFANA_ORG_ID
  value: {{ .orgId | quote }}
- name: RAY_GRAFANA_CLUSTER_FILTER
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['ray.io/cluster']
{{- if $.Values.monitoring.dashboards.enabled }}
- name: RAY_GRAFANA_DATA_DASHBOARD_UID
  value: {{ include "tetris-serve.dashboardUid" (list $ "tetris-speculation") }}
{{- end }}
{{- with .iframeHost }}
- name: RAY_GRAFANA_IFRAME_HOST
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.monitoring.prometheus }}
{{- if .host }}
- name: RAY_PROMETHEUS_HOST
  value: {{ .host | quote }}
- name: RAY_PROMETHEUS_NAME
  value: {{ .name | quote }}
{{- end }}
{{- end }}
{{- end -}}
