#!/usr/bin/env bash
# The life of an API key on a server that runs on meanwhile: made, used, limited, revoked.
#
#   tests/serving/key_life.sh http://127.0.0.1:8000 keys.json MODEL
#
# keys.json is what the server's http.access.keys_file names. Ends with an error where an
# answer is another than serving/front/README.md promises.
set -euo pipefail
url=$1 file=$2 model=$3
name=key-life-$$ per_minute=4
answer=$(mktemp)
revoke() { tetris-serve keys revoke --file "$file" "$name"; }
trap 'rm -f "$answer"; revoke 2>/dev/null || true' EXIT

# Fronts look at the file each second.
wait_for_fronts() { sleep 1.5; }

# Ask for two tokens; print the status, and keep the headers.
ask() {
    curl --silent --show-error --output /dev/null --dump-header "$answer" \
        --write-out '%{http_code}' --header @<(echo "Authorization: Bearer $key") \
        --header 'Content-Type: application/json' \
        --data "{\"model\": \"$model\", \"prompt\": \"Hi\", \"max_tokens\": 2}" \
        "$url/v1/completions"
}
header() { sed -n "s/^$1: \([0-9]*\).*/\1/Ip" "$answer"; }
expect() { [[ $2 == "$3" ]] || { echo "$1: $2, where $3 was expected" >&2; exit 1; }; }

key=$(tetris-serve keys new --file "$file" "$name" --requests-per-minute $per_minute)
wait_for_fronts
echo "made: $name, $per_minute requests a minute"

# How many fronts share a rate, each learns with its first request.
status=200 num_answers=0
while status=$(ask); [[ $status == 200 && $num_answers -lt 10 ]]; do
    num_answers=$((num_answers + 1))
    expect limit "$(header x-ratelimit-limit-requests)" $per_minute
done
echo "used: $num_answers times"

expect status "$status" 429
expect remaining "$(header x-ratelimit-remaining-requests)" 0
wait_s=$(header retry-after)
((wait_s >= 1 && wait_s <= 60)) || expect retry-after "$wait_s" "1 to 60"
echo "limited: status $status, again in $wait_s s"

revoke
wait_for_fronts
for _ in 1 2 3 4; do expect status "$(ask)" 401; done
echo "revoked: status 401"
