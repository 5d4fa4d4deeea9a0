{{/* Serve reads these once, when a Ray cluster starts it. */}}
{{- define "tetris-serve.httpOptions" -}}
host: 0.0.0.0
port: {{ include "tetris-serve.httpPort" . }}
keep_alive_timeout_s: {{ include "tetris-serve.setting" (list . "http" "keep_alive_timeout_s" 90) }}
{{- with .Values.serve.requestTimeoutSeconds }}
request_timeout_s: {{ . }}
{{- end }}
{{- end -}}

{{/*
The Ray Serve config. `config` goes through untouched: serving.app:build checks it with
the schema that values.schema.json was generated from.
*/}}
{{- define "tetris-serve.serveConfig" -}}
{{- $config := include "tetris-serve.config" . | fromYaml -}}
{{- with .Values.serve.tracing }}
{{- if .enabled }}
{{- $extra := merge (dict) (dig "engine" "extra" dict $config) (dict "otlp_traces_endpoint" .endpoint) -}}
{{- $_ := set $config.engine "extra" $extra -}}
{{- end }}
{{- end -}}
{{- /*
A front asks for no CPU, so the head's lack of them does not keep it away, and a restart
of the head would end all requests. Nodes are labelled with KubeRay's group.
*/}}
{{- $http := get $config "http" | default dict -}}
{{- $offTheHead := dict "label_selector" (dict "ray.io/node-group" "!headgroup") -}}
{{- $_ := set $http "fronts" (merge (get $http "fronts" | default dict) $offTheHead) -}}
{{- if include "tetris-serve.keysSecret" . -}}
{{- $keysFile := dict "keys_file" "/etc/tetris-serve/keys/keys.json" -}}
{{- $_ := set $http "access" (merge (get $http "access" | default dict) $keysFile) -}}
{{- end -}}
{{- $_ := set $config "http" $http -}}
{{- $scale := include "tetris-serve.scale" . | fromYaml -}}
{{- $replicas := get $config "replicas" | default dict -}}
{{- $_ := set $config "replicas" (omit $replicas "min" "max" "upscale_delay_s" "downscale_delay_s") -}}
{{- /* Probes and Service count on a proxy on every worker that has a replica. */ -}}
proxy_location: EveryNode
http_options:
  {{- include "tetris-serve.httpOptions" . | nindent 2 }}
logging_config:
  encoding: {{ .Values.serve.logging.encoding }}
  log_level: {{ .Values.serve.logging.level }}
  enable_access_log: {{ .Values.serve.logging.accessLog }}
{{- with .Values.serve.tracing }}
{{- if .enabled }}
tracing_config:
  enabled: true
  exporter_import_path: serving.tracing:build_span_processors
  sampling_ratio: {{ .samplingRatio }}
{{- end }}
{{- end }}
applications:
  - name: {{ .Values.serve.applicationName }}
    route_prefix: {{ .Values.serve.routePrefix }}
    import_path: serving.app:build
    args:
      {{- toYaml $config | nindent 6 }}
    {{- /* Ray names engines after the model, by these rules. */}}
    {{- $model := $config.model.id | replace "/" "--" | replace "." "_" }}
    {{- $told := mergeOverwrite (deepCopy .Values.live) (dict "replicas" (dict "min" (get $scale "min_replicas"))) }}
    deployments:
      - name: {{ printf "TetrisEngine:%s" $model | quote }}
        autoscaling_config:
          {{- toYaml $scale | nindent 10 }}
        user_config: {{- toYaml $told | nindent 10 }}
      - name: TetrisFront
        user_config: {{- toYaml $told | nindent 10 }}
{{- end -}}

{{/*
How many engines there may be, as serving/app.py says it to Serve: all of it, for Serve
merges nothing. A change of `args` would restart every engine; of these, none.
*/}}
{{- define "tetris-serve.scale" -}}
min_replicas: {{ include "tetris-serve.minReplicas" . }}
max_replicas: {{ include "tetris-serve.maxReplicas" . }}
target_ongoing_requests: {{ include "tetris-serve.targetRequests" . }}
upscale_delay_s: {{ include "tetris-serve.setting" (list . "replicas" "upscale_delay_s" 10) }}
downscale_delay_s: {{ include "tetris-serve.setting" (list . "replicas" "downscale_delay_s" 300) }}
{{- with dig "replicas" "target_token_ms" nil (include "tetris-serve.config" . | fromYaml) }}
policy:
  policy_function: serving.autoscaler:TokenTimeScaling
  policy_kwargs:
    target_token_ms: {{ . }}
    usual_capacity: {{ include "tetris-serve.targetRequests" $ }}
{{- end }}
{{- end -}}
{{- define "tetris-serve.targetRequests" -}}
{{ include "tetris-serve.setting" (list . "replicas" "target_ongoing_requests" 16) }}
{{- end -}}
