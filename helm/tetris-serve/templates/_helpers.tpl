{{/*
Name of the RayService, which KubeRay wants to begin with a letter. What is named after it
leaves 45 characters: KubeRay keeps the last 50 of an account's name (ours is NAME-head), and
a Job's name, a label's value, may have 63 (NAME-download- and eight more).
*/}}
{{- define "tetris-serve.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := printf "%s-%s" .Release.Name $chart -}}
{{- if contains $chart .Release.Name -}}
{{- $name = .Release.Name -}}
{{- end -}}
{{- default $name .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{- define "tetris-serve.serviceName" -}}
{{ include "tetris-serve.fullname" . }}-serve-svc
{{- end -}}

{{/*
Secret with the API keys; empty where config.http.access says otherwise who may call.
*/}}
{{- define "tetris-serve.keysSecret" -}}
{{- $access := dig "http" "access" dict (include "tetris-serve.config" . | fromYaml) -}}
{{- if not (or $access.allow_anonymous $access.keys_file) -}}
{{ default (printf "%s-api-keys" (include "tetris-serve.fullname" .)) .Values.apiKeys.existingSecret }}
{{- end -}}
{{- end -}}

{{- define "tetris-serve.image" -}}
{{- $variant := ternary "gpu" "cpu" (eq (include "tetris-serve.device" .) "gpu") -}}
{{- $tag := default (printf "%s-%s" .Chart.AppVersion $variant) .Values.image.tag -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}:{{ $tag }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}

{{/*
Labels that all Pods of a RayService carry, whichever Ray cluster they belong to; a release
may have several (../several-models). KubeRay keeps app.kubernetes.io/name for itself: its
head Service selects by it.
*/}}
{{- define "tetris-serve.selectorLabels" -}}
app.kubernetes.io/part-of: tetris-serve
app.kubernetes.io/instance: {{ include "tetris-serve.fullname" . }}
{{- end -}}

{{- define "tetris-serve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "tetris-serve.selectorLabels" . }}
{{- end -}}

{{/*
metadata of an object: (list . "name" extraLabels extraAnnotations). The chart's own labels
stay what they are, and a label that is given twice is written once.
*/}}
{{- define "tetris-serve.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
labels:
  {{- toYaml (merge (include "tetris-serve.labels" $root | fromYaml) (index . 2) $root.Values.commonLabels) | nindent 2 }}
{{- with merge (dict) (index . 3) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tetris-serve.serviceAccountName" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.serviceAccount.create -}}
{{ include "tetris-serve.fullname" $root }}-{{ index . 1 }}
{{- else -}}
{{ default "default" $root.Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* What is served: values' `config`, else the demo. */}}
{{- define "tetris-serve.config" -}}
{{- toYaml (.Values.config | default (.Files.Get "examples/demo-cpu.yaml" | fromYaml).config) -}}
{{- end -}}

{{/*
One setting of `config`, with the default of serving/settings/model.py where it is left out:
(list . "section" "name" default). Tests compare the defaults with the schema's.
*/}}
{{- define "tetris-serve.setting" -}}
{{- $config := include "tetris-serve.config" (index . 0) | fromYaml -}}
{{- $section := index $config (index . 1) | default dict -}}
{{- $value := index . 3 -}}
{{- if hasKey $section (index . 2) -}}
{{- $value = index $section (index . 2) -}}
{{- end -}}
{{- $value -}}
{{- end -}}

{{- define "tetris-serve.device" -}}
{{ include "tetris-serve.setting" (list . "engine" "device" "cpu") }}
{{- end -}}
{{/* As serving/settings/policy_choice.py chooses where none is named. */}}
{{- define "tetris-serve.policy" -}}
{{- $config := include "tetris-serve.config" . | fromYaml -}}
{{- $drafts := $config.model.draft -}}
{{- range list "method" "draft_tokens" "max_draft_tokens" "extra_draft_tokens" -}}
{{- if hasKey ($config.policy | default dict) . -}}{{- $drafts = true -}}{{- end -}}
{{- end -}}
{{- $chosen := ternary "fixed" "goodput" (eq (include "tetris-serve.device" .) "gpu") -}}
{{- if not $drafts -}}{{- $chosen = "none" -}}{{- end -}}
{{ include "tetris-serve.setting" (list . "policy" "name" $chosen) }}
{{- end -}}
{{- define "tetris-serve.minReplicas" -}}
{{ include "tetris-serve.setting" (list . "replicas" "min" 1) }}
{{- end -}}
{{- define "tetris-serve.maxReplicas" -}}
{{ include "tetris-serve.setting" (list . "replicas" "max" 1) }}
{{- end -}}
{{- define "tetris-serve.httpPort" -}}
{{ include "tetris-serve.setting" (list . "http" "port" 8000) }}
{{- end -}}
{{/*
In nginx's words, whose units are powers of 1024 and have one letter. 4M becomes a little
more, 4m; the server itself keeps to the setting.
*/}}
{{- define "tetris-serve.maxBodySize" -}}
{{- $size := include "tetris-serve.setting" (list . "http" "max_body_bytes" 4194304) -}}
{{- if regexMatch "^[0-9]+ *[kKMG]i?B?$" $size -}}
{{ regexReplaceAll "^([0-9]+) *([kKMG])i?B?$" $size "${1}${2}" | lower }}
{{- else if regexMatch "[kKMGTPB]" $size -}}
{{- fail (printf "config.http.max_body_bytes: write a whole number of k, M or G for nginx, such as 4Mi (got %s)" $size) -}}
{{- else -}}
{{ $size | float64 | int64 }}
{{- end -}}
{{- end -}}
{{- define "tetris-serve.requestDrainSeconds" -}}
{{ include "tetris-serve.setting" (list . "replicas" "drain_timeout_s" 120) | float64 | ceil | int }}
{{- end -}}

{{/* What Ray is given to drain a node: replacements start, then requests end. */}}
{{- define "tetris-serve.nodeDrainSeconds" -}}
{{ add .Values.drain.migrationSeconds (include "tetris-serve.requestDrainSeconds" .) }}
{{- end -}}

{{- define "tetris-serve.workerGraceSeconds" -}}
{{- $needed := add (include "tetris-serve.nodeDrainSeconds" .) 30 -}}
{{- $given := .Values.drain.terminationGracePeriodSeconds -}}
{{- ternary $needed $given (kindIs "invalid" $given) -}}
{{- end -}}

{{- define "tetris-serve.clusterDeletionDelaySeconds" -}}
{{- $needed := add (include "tetris-serve.requestDrainSeconds" .) 30 -}}
{{- $given := .Values.upgrade.clusterDeletionDelaySeconds -}}
{{- ternary $needed $given (kindIs "invalid" $given) -}}
{{- end -}}

{{/* Ray CPUs of a Pod, as KubeRay counts them: (list group). */}}
{{- define "tetris-serve.cpus" -}}
{{- $group := index . 0 -}}
{{- $resources := $group.resources | default dict -}}
{{- $given := dig "requests" "cpu" 0 $resources | toString -}}
{{- $given = dig "limits" "cpu" $given $resources | toString -}}
{{- $given = dig "num-cpus" $given ($group.rayStartParams | default dict) | toString -}}
{{- $unit := ternary 1000.0 1.0 (hasSuffix "m" $given) -}}
{{- divf (trimSuffix "m" $given | float64) $unit | ceil | int -}}
{{- end -}}

{{- define "tetris-serve.gpusPerReplica" -}}
{{- $stages := dig "engine" "extra" "pipeline_parallel_size" 1 (include "tetris-serve.config" . | fromYaml) -}}
{{ mulf (include "tetris-serve.setting" (list . "replicas" "num_gpus" 0) | float64) (include "tetris-serve.setting" (list . "engine" "tensor_parallel_size" 1) | float64) (float64 $stages) }}
{{- end -}}

{{/*
Engine replicas that Ray places on a Pod of a group, by what each of them reserves:
(list . group). A little is added against the rounding of fractions.
*/}}
{{- define "tetris-serve.enginesThatFit" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- $each := include "tetris-serve.setting" (list $root "replicas" "num_cpus" 1) | float64 -}}
{{- $bounds := list -}}
{{- if gt $each 0.0 -}}
{{- $bounds = append $bounds (addf 1e-6 (divf (include "tetris-serve.cpus" (list $group) | float64) $each) | floor | int) -}}
{{- end -}}
{{- if eq (include "tetris-serve.device" $root) "gpu" -}}
{{- $gpus := include "tetris-serve.gpusPerReplica" $root | float64 -}}
{{- $bounds = append $bounds (addf 1e-6 (divf (float64 $group.gpus) $gpus) | floor | int) -}}
{{- end -}}
{{- $fit := first $bounds -}}
{{- range $bounds -}}{{- $fit = min $fit . -}}{{- end -}}
{{- $fit -}}
{{- end -}}

{{/* Those that the numbers of workers count on: (list . group). */}}
{{- define "tetris-serve.enginesPerPod" -}}
{{- $group := index . 1 -}}
{{- ternary (include "tetris-serve.enginesThatFit" .) $group.enginesPerPod (kindIs "invalid" $group.enginesPerPod) -}}
{{- end -}}

{{/* Pods a group needs for a number of engine replicas: (list . group replicas). */}}
{{- define "tetris-serve.podsFor" -}}
{{- divf (index . 2 | float64) (include "tetris-serve.enginesPerPod" . | float64) | ceil | int -}}
{{- end -}}

{{- define "tetris-serve.groupMax" -}}
{{- $group := index . 1 -}}
{{- $needed := include "tetris-serve.podsFor" (list (index . 0) $group (include "tetris-serve.maxReplicas" (index . 0))) -}}
{{- ternary $needed $group.maxReplicas (kindIs "invalid" $group.maxReplicas) -}}
{{- end -}}

{{- define "tetris-serve.groupMin" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- if not $root.Values.autoscaling.enabled -}}
{{ include "tetris-serve.groupMax" . }}
{{- else -}}
{{- $needed := include "tetris-serve.podsFor" (list $root $group (include "tetris-serve.minReplicas" $root)) -}}
{{- /* Without engines there is still a front, and it has to be somewhere. */ -}}
{{- $fronts := dig "http" "fronts" "label_selector" dict (include "tetris-serve.config" $root | fromYaml) -}}
{{- if and (eq $needed "0") (ne (get $fronts "ray.io/node-group") "headgroup") -}}{{- $needed = "1" -}}{{- end -}}
{{- ternary $needed $group.minReplicas (kindIs "invalid" $group.minReplicas) -}}
{{- end -}}
{{- end -}}

{{/* Workers of all groups that are always kept. */}}
{{- define "tetris-serve.minWorkers" -}}
{{- $sum := 0 -}}
{{- range .Values.workerGroups -}}
{{- $sum = add $sum (include "tetris-serve.groupMin" (list $ (include "tetris-serve.group" . | fromYaml)) | int) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* Workers that no eviction may take: all but one of those that are always kept. */}}
{{- define "tetris-serve.minAvailable" -}}
{{- $given := .Values.podDisruptionBudget.minAvailable -}}
{{- ternary (max 0 (sub (include "tetris-serve.minWorkers" . | int) 1)) $given (kindIs "invalid" $given) -}}
{{- end -}}

{{/* A group as given, completed with the defaults of the group `engines`. */}}
{{- define "tetris-serve.group" -}}
{{- $defaults := dict "enginesPerPod" nil "gpus" 0 "gpuResource" "nvidia.com/gpu" "shmSize" "2Gi" "minReplicas" nil "maxReplicas" nil "resources" (dict) -}}
{{- toYaml (merge (dict) . $defaults) -}}
{{- end -}}

{{- define "tetris-serve.usesModelHub" -}}
{{- $given := .Values.networkPolicy.modelHub.enabled -}}
{{- if not (kindIs "invalid" $given) -}}
{{- ternary "true" "" $given -}}
{{- else -}}
{{- if ne (include "tetris-serve.hubModels" .) "[]" -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether a model lies in the cache's claim, as one that was put there by hand. */}}
{{- define "tetris-serve.hasModelInCache" -}}
{{- $config := include "tetris-serve.config" . | fromYaml -}}
{{- range $field := list "target" "draft" "tokenizer" -}}
{{- if hasPrefix "/var/cache/tetris/" (index $config.model $field | default "") -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Id and title of a dashboard, which Grafana wants to have once, and the name of its file,
which its sidecar does: (list . "name").
*/}}
{{- define "tetris-serve.dashboardUid" -}}
{{- $root := index . 0 -}}
{{ index . 1 }}-{{ printf "%s/%s" $root.Release.Namespace (include "tetris-serve.fullname" $root) | sha256sum | trunc 8 }}
{{- end -}}
