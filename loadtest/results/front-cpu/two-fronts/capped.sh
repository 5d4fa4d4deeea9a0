#!/bin/bash
# `tetris-serve up --port PORT ...`, each front held to a tenth of a core once it serves, as
# a Pod's CPU limit would. Takes root, and version 1 of the controller `cpu`.
port=$1; shift
tetris-serve up --port "$port" "$@" &
up=$!
trap 'kill -INT $up' INT TERM
while kill -0 $up 2>/dev/null; do
    if curl -sf "http://127.0.0.1:$port/health" >/dev/null; then
        for pid in $(pgrep -f 'ServeReplica.*TetrisFront'); do
            group=/sys/fs/cgroup/cpu/front-$pid
            [ -d $group ] && continue
            mkdir $group
            echo 50000 >$group/cpu.cfs_period_us
            echo 5000 >$group/cpu.cfs_quota_us
            echo $pid >$group/cgroup.procs
        done
    fi
    sleep 1
done
wait $up
