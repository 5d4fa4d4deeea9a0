{{/*
What values.schema.json cannot say: values that are fine by themselves but contradict each
other. The settings' own contradictions are left to `tetris-serve check`, except for those
that concern what Kubernetes is asked for.
*/}}
{{- define "tetris-serve.check" -}}
{{- $device := include "tetris-serve.device" . -}}
{{- $min := include "tetris-serve.minReplicas" . | int -}}
{{- $max := include "tetris-serve.maxReplicas" . | int -}}
{{- $gpusPerReplica := mulf (include "tetris-serve.setting" (list . "replicas" "num_gpus" 0) | float64) (include "tetris-serve.setting" (list . "engine" "tensor_parallel_size" 1) | float64) -}}

{{- range $field := list "target" "draft" "tokenizer" -}}
{{- with index $.Values.config.model $field -}}
{{- if hasPrefix "." . -}}
{{- fail (printf "config.model.%s: %s is relative, and a Pod has no folder that it could start from; give an absolute path in the container or a hub id" $field .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if lt $max $min -}}
{{- fail (printf "config.replicas.max: must be at least config.replicas.min (%d, got %d)" $min $max) -}}
{{- end -}}
{{- if and (eq $device "gpu") (eq $gpusPerReplica 0.0) -}}
{{- fail "config.replicas.num_gpus: must be above 0 with config.engine.device gpu; set it to 1" -}}
{{- end -}}

{{- $capacity := 0 -}}
{{- range $name, $values := .Values.workerGroups -}}
{{- $group := include "tetris-serve.group" $values | fromYaml -}}
{{- $needed := mulf $gpusPerReplica (float64 $group.enginesPerPod) -}}
{{- if and (eq $device "gpu") (gt $needed (float64 $group.gpus)) -}}
{{- fail (printf "workerGroups.%s.gpus: %v do not hold enginesPerPod %v x tensor_parallel_size x num_gpus = %v; raise gpus or lower enginesPerPod" $name $group.gpus $group.enginesPerPod $needed) -}}
{{- end -}}
{{- $low := include "tetris-serve.groupMin" (list $ $group) | int -}}
{{- $high := include "tetris-serve.groupMax" (list $ $group) | int -}}
{{- if lt $high $low -}}
{{- fail (printf "workerGroups.%s.maxReplicas: must be at least minReplicas (%d, got %d)" $name $low $high) -}}
{{- end -}}
{{- $capacity = add $capacity (mul $high $group.enginesPerPod) -}}
{{- end -}}
{{- if lt (int $capacity) $max -}}
{{- fail (printf "workerGroups: hold at most %d engine replicas, but Serve may ask for config.replicas.max = %d and would wait for ever; raise maxReplicas or enginesPerPod of a group, or lower config.replicas.max" (int $capacity) $max) -}}
{{- end -}}

{{- $params := dict "head.rayStartParams" .Values.head.rayStartParams -}}
{{- range $name, $values := .Values.workerGroups -}}
{{- $_ := set $params (printf "workerGroups.%s.rayStartParams" $name) ($values.rayStartParams | default dict) -}}
{{- end -}}
{{- range $where, $given := $params -}}
{{- range $name := list "labels" "redis-password" "redis-username" -}}
{{- if hasKey $given $name -}}
{{- fail (printf "%s.%s: KubeRay refuses it here; remove it (Redis and its Secret are set in gcsFaultTolerance)" $where $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- $grace := include "tetris-serve.workerGraceSeconds" . | int -}}
{{- $drain := include "tetris-serve.nodeDrainSeconds" . | int -}}
{{- if lt $grace $drain -}}
{{- fail (printf "drain.terminationGracePeriodSeconds: %d is less than the %d s that drain.migrationSeconds and config.replicas.drain_timeout_s take, so streams would be cut; raise it or leave it null" $grace $drain) -}}
{{- end -}}

{{- $requests := include "tetris-serve.requestDrainSeconds" . | int -}}
{{- $delay := include "tetris-serve.clusterDeletionDelaySeconds" . | int -}}
{{- if lt $delay $requests -}}
{{- fail (printf "upgrade.clusterDeletionDelaySeconds: %d is less than the %d s of config.replicas.drain_timeout_s, so the old cluster's streams would be cut; raise it or leave it null" $delay $requests) -}}
{{- end -}}

{{- if eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade" -}}
{{- if not .Values.autoscaling.enabled -}}
{{- fail "upgrade.type: NewClusterWithIncrementalUpgrade needs autoscaling.enabled: true" -}}
{{- end -}}
{{- if not .Values.upgrade.incremental.gatewayClassName -}}
{{- fail "upgrade.incremental.gatewayClassName: is required by NewClusterWithIncrementalUpgrade; name a GatewayClass of the cluster" -}}
{{- end -}}
{{- if gt (int .Values.upgrade.incremental.stepSizePercent) (int .Values.upgrade.incremental.maxSurgePercent) -}}
{{- fail "upgrade.incremental.stepSizePercent: must be at most maxSurgePercent" -}}
{{- end -}}
{{- if or .Values.ingress.enabled .Values.gateway.enabled -}}
{{- fail "upgrade.type: NewClusterWithIncrementalUpgrade routes through a Gateway that KubeRay makes; set ingress.enabled and gateway.enabled to false" -}}
{{- end -}}
{{- end -}}

{{- if and .Values.gcsFaultTolerance.enabled (not .Values.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: is required with gcsFaultTolerance.enabled; give host:port" -}}
{{- end -}}
{{- if and .Values.serve.tracing.enabled (not .Values.serve.tracing.endpoint) -}}
{{- fail "serve.tracing.endpoint: is required with serve.tracing.enabled, e.g. http://otel-collector.monitoring:4317" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: is empty; list {host, paths} entries or set ingress.enabled: false" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs: is empty; name the Gateway the route belongs to" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "tetris-serve.fullname" .)) -}}
{{- fail (printf "fullnameOverride: KubeRay needs a name of lower-case letters, digits and dashes that begins with a letter (got %q)" (include "tetris-serve.fullname" .)) -}}
{{- end -}}
{{- end -}}
