{{/*
What values.schema.json cannot say: values that are fine by themselves but contradict each
other. The settings' own contradictions are left to `tetris-serve check`, except for those
that concern what Kubernetes is asked for.
*/}}
{{- define "tetris-serve.check" -}}
{{- $device := include "tetris-serve.device" . -}}
{{- $min := include "tetris-serve.minReplicas" . | int -}}
{{- $max := include "tetris-serve.maxReplicas" . | int -}}
{{- $config := include "tetris-serve.config" . | fromYaml -}}
{{- include "tetris-serve.checkIgnored" . -}}
{{- include "tetris-serve.checkPort" . -}}
{{- include "tetris-serve.checkLabels" . -}}

{{- range $field := list "target" "draft" "tokenizer" -}}
{{- with index $config.model $field -}}
{{- if hasPrefix "." . -}}
{{- fail (printf "config.model.%s: %s is relative, and a Pod has no folder that it could start from; give an absolute path in the container or a hub id" $field .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if lt $max $min -}}
{{- fail (printf "config.replicas.max: must be at least config.replicas.min (%d, got %d)" $min $max) -}}
{{- end -}}
{{- if and (eq $device "gpu") (eq (include "tetris-serve.gpusPerReplica" . | float64) 0.0) -}}
{{- fail "config.replicas.num_gpus: must be above 0 with config.engine.device gpu; set it to 1" -}}
{{- end -}}
{{- if gt (include "tetris-serve.setting" (list . "replicas" "num_gpus" 0) | float64) 1.0 -}}
{{- fail "config.replicas.num_gpus: must be at most 1, what each worker gets of a GPU; for several in one replica set config.engine.tensor_parallel_size" -}}
{{- end -}}

{{- if and (eq $device "cpu") (eq (include "tetris-serve.setting" (list . "replicas" "num_cpus" 1) | float64) 0.0) -}}
{{- fail "config.replicas.num_cpus: must be above 0 with config.engine.device cpu, or Ray places all replicas on one Pod; set it to the CPUs of one engine" -}}
{{- end -}}

{{- $capacity := 0 -}}
{{- range $name, $values := .Values.workerGroups -}}
{{- $group := include "tetris-serve.group" $values | fromYaml -}}
{{- include "tetris-serve.checkGroup" (list $ $name $group) -}}
{{- $low := include "tetris-serve.groupMin" (list $ $group) | int -}}
{{- $high := include "tetris-serve.groupMax" (list $ $group) | int -}}
{{- if lt $high $low -}}
{{- fail (printf "workerGroups.%s.maxReplicas: must be at least minReplicas (%d, got %d)" $name $low $high) -}}
{{- end -}}
{{- $capacity = add $capacity (mul $high (include "tetris-serve.enginesPerPod" (list $ $group) | int)) -}}
{{- end -}}
{{- if lt (int $capacity) $max -}}
{{- fail (printf "workerGroups: hold at most %d engine replicas, but Serve may ask for config.replicas.max = %d and would wait for ever; raise maxReplicas of a group, or lower config.replicas.max" (int $capacity) $max) -}}
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
{{- if lt $grace (int (add $drain 30)) -}}
{{- fail (printf "drain.terminationGracePeriodSeconds: %d is less than the %d s of drain.migrationSeconds and config.replicas.drain_timeout_s and half a minute for Ray to end, so streams would be cut; raise it or leave it null" $grace $drain) -}}
{{- end -}}

{{- $available := include "tetris-serve.minAvailable" . | int -}}
{{- $spare := max 0 (sub (include "tetris-serve.minWorkers" . | int) 1) | int -}}
{{- if and .Values.podDisruptionBudget.enabled (gt $available $spare) -}}
{{- fail (printf "podDisruptionBudget.minAvailable: %d leaves none of the workers that are kept free to go, so no node could be drained; give at most %d or leave it null" $available $spare) -}}
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
{{- if .Values.modelCache.download.enabled -}}
{{- if not .Values.modelCache.enabled -}}
{{- fail "modelCache.download.enabled: has nowhere to download to; set modelCache.enabled: true" -}}
{{- end -}}
{{- if eq (include "tetris-serve.fetchedModels" .) "[]" -}}
{{- fail "modelCache.download.enabled: config.model names nothing from a hub and no GGUF file; set it to false" -}}
{{- end -}}
{{- if not (or .Values.modelCache.existingClaim (has "ReadWriteMany" .Values.modelCache.accessModes)) -}}
{{- fail "modelCache.accessModes: a Job and workers on other nodes would wait for each other; use ReadWriteMany, or set modelCache.download.enabled: false" -}}
{{- end -}}
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

{{/* Settings that only `tetris-serve up` reads. */}}
{{- define "tetris-serve.checkIgnored" -}}
{{- $http := (include "tetris-serve.config" . | fromYaml).http | default dict -}}
{{- $instead := dict
      "host" "Serve listens on all addresses of its Pod; networkPolicy.clients says who reaches it"
      "dashboard_port" "Ray's dashboard has port 8265 of the head; forward another one to it"
      "metrics_port" "KubeRay has metrics on port 8080 of every Pod, which monitoring.podMonitor scrapes" -}}
{{- range $name, $reason := $instead -}}
{{- if hasKey $http $name -}}
{{- fail (printf "config.http.%s: has no effect in a cluster; remove it (%s)" $name $reason) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ray's ports in a Pod; its processes take theirs from 10002 to 19999, fronts from 30000. */}}
{{- define "tetris-serve.checkPort" -}}
{{- $port := include "tetris-serve.httpPort" . | int -}}
{{- $own := dict "6379" "GCS" "8265" "the dashboard" "8080" "metrics" "44217" "the autoscaler's metrics" "44227" "the dashboard's metrics" "52365" "Ray's agent" "10001" "Ray's client server" "8404" "HAProxy's statistics" "9101" "HAProxy's metrics" "8500" "Serve's proxy for want of fronts" -}}
{{- $owner := get $own (toString $port) -}}
{{- if and (gt $port 10001) (lt $port 20000) -}}{{- $owner = "Ray's processes" -}}{{- end -}}
{{- if and (ge $port 30000) (le $port 31000) -}}{{- $owner = "fronts" -}}{{- end -}}
{{- with $owner -}}
{{- fail (printf "config.http.port: %d belongs to %s in these Pods; take another one, such as 8000" $port .) -}}
{{- end -}}
{{- end -}}

{{/* By these, Services, budgets, policies and monitors find the Pods. */}}
{{- define "tetris-serve.checkLabels" -}}
{{- $given := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels "head.podLabels" .Values.head.podLabels -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- $_ := set $given (printf "workerGroups.%s.podLabels" $name) ($group.podLabels | default dict) -}}
{{- end -}}
{{- range $where, $labels := $given -}}
{{- range $label, $_ := $labels -}}
{{- if regexMatch "^(ray[.]io/|helm[.]sh/|app[.]kubernetes[.]io/(name|instance|version|component|part-of|managed-by|created-by)$)" $label -}}
{{- fail (printf "%s.%s: is set by the chart or by KubeRay, and Services, budgets and network policies select Pods by such labels; take another name" $where $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether a group's Pods hold what they are counted on for: (list . name group). */}}
{{- define "tetris-serve.checkGroup" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $group := index . 2 -}}
{{- $resources := $group.resources | default dict -}}
{{- if or (not (or (dig "requests" "memory" "" $resources) (dig "limits" "memory" "" $resources))) (eq (include "tetris-serve.cpus" (list $group)) "0") -}}
{{- fail (printf "workerGroups.%s.resources: is incomplete; give requests.cpu, which becomes the number of Ray CPUs, and memory" $name) -}}
{{- end -}}
{{- if gt (len $root.Values.workerGroups) 1 -}}
{{- range $bound := list "minReplicas" "maxReplicas" -}}
{{- if kindIs "invalid" (index $group $bound) -}}
{{- fail (printf "workerGroups.%s.%s: is required where there are several groups; divide config.replicas among them" $name $bound) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $fit := include "tetris-serve.enginesThatFit" (list $root $group) | int -}}
{{- $holds := printf "%s Ray CPUs and %v GPUs" (include "tetris-serve.cpus" (list $group)) $group.gpus -}}
{{- if eq $fit 0 -}}
{{- fail (printf "workerGroups.%s: a Pod has %s, too little for one replica of config.replicas.num_cpus and num_gpus x tensor_parallel_size; raise resources or gpus" $name $holds) -}}
{{- end -}}
{{- $engines := include "tetris-serve.enginesPerPod" (list $root $group) | int -}}
{{- /* Custom resources of Ray may allow fewer. */ -}}
{{- $custom := include "tetris-serve.setting" (list $root "replicas" "resources" dict) -}}
{{- if or (gt $engines $fit) (and (lt $engines $fit) (eq $custom "map[]")) -}}
{{- fail (printf "workerGroups.%s.enginesPerPod: Ray places %d replicas on a Pod with %s (got %d); leave it null, or change config.replicas.num_cpus, resources or gpus" $name $fit $holds $engines) -}}
{{- end -}}
{{- end -}}
