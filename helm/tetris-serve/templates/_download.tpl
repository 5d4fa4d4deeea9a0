{{/* Models, draft and tokenizer that come from a hub, by their ids, as a JSON list. */}}
{{- define "tetris-serve.hubModels" -}}
{{- $config := include "tetris-serve.config" . | fromYaml -}}
{{- $found := list -}}
{{- range $field := list "target" "draft" "tokenizer" -}}
{{- with index $config.model $field -}}
{{- if not (regexMatch "^(/|~|\\./|\\.\\./|\\.{1,2}$|package:)" .) -}}
{{- $found = append $found (trimPrefix "hf://" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found | uniq | toJson -}}
{{- end -}}

{{/*
Those that are GGUF files, in a package of the image or in the claim, as a JSON list: vLLM
serves what they are converted into.
*/}}
{{- define "tetris-serve.ggufModels" -}}
{{- $config := include "tetris-serve.config" . | fromYaml -}}
{{- $found := list -}}
{{- range $field := list "target" "draft" "tokenizer" -}}
{{- with index $config.model $field -}}
{{- if regexMatch "^(package:|/var/cache/tetris/.*[.]gguf$)" . -}}
{{- $found = append $found . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found | uniq | toJson -}}
{{- end -}}

{{/* All that the Job puts into the cache, as a JSON list. */}}
{{- define "tetris-serve.fetchedModels" -}}
{{- $found := concat (include "tetris-serve.hubModels" . | fromJsonArray) (include "tetris-serve.ggufModels" . | fromJsonArray) -}}
{{- /* Two empty lists make none. */ -}}
{{- $found | default list | toJson -}}
{{- end -}}

{{/*
Whether the head needs what the Job makes: it checks folders that files were converted
into, and would convert them itself, into a cache of its own.
*/}}
{{- define "tetris-serve.headWaits" -}}
{{- if and .Values.modelCache.enabled .Values.modelCache.download.enabled (ne (include "tetris-serve.ggufModels" .) "[]") -}}true{{- end -}}
{{- end -}}

{{/* The file that says that these models are in the cache. */}}
{{- define "tetris-serve.downloadMarker" -}}
/var/cache/tetris/.downloaded-{{ include "tetris-serve.fetchedModels" . | sha256sum | trunc 8 }}
{{- end -}}

{{- define "tetris-serve.downloadPod" -}}
metadata:
  labels:
    {{- include "tetris-serve.podLabels" (list . "download" dict) | nindent 4 }}
spec:
  restartPolicy: OnFailure
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "tetris-serve.scheduling" (list . .Values.head) | trim | nindent 2 }}
  containers:
    - {{- $env := list (dict "name" "TETRIS_MODELS" "value" (include "tetris-serve.fetchedModels" .)) (dict "name" "TETRIS_MARKER" "value" (include "tetris-serve.downloadMarker" .)) }}
      {{- include "tetris-serve.container" (list . "download" $env list) | nindent 6 }}
      command: [python, -c, {{ .Files.Get "files/download.py" | toJson }}]
      resources:
        {{- toYaml .Values.modelCache.download.resources | nindent 8 }}
  volumes:
    {{- include "tetris-serve.volumes" (list . list "64Mi" "worker") | nindent 4 }}
{{- end -}}

{{/* Who waits for it would otherwise do the same, and all of them at once. */}}
{{- define "tetris-serve.waitForDownload" -}}
- name: models
  image: {{ include "tetris-serve.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -c, "trap 'exit 1' TERM; until test -e {{ include "tetris-serve.downloadMarker" . }}; do sleep 5; done"]
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 32Mi}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: model-cache, mountPath: /var/cache/tetris, readOnly: true}
{{- end -}}
