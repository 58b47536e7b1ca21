#!/usr/bin/env bash
# One or two small real Ceph object stores (monitor, OSD, RADOS gateway) on 127.0.0.1,
# without systemd, for tests and benchmarks. `sh tools/setup.sh peers` installs Ceph.
#
#   ceph_rgw.sh start              bring the sites up (idempotent; resumes old data)
#   ceph_rgw.sh status             daemons, memory, endpoints; exit 0 only if all up
#   ceph_rgw.sh env                print shell assignments (endpoints, keys)
#   ceph_rgw.sh stop               stop every daemon this data directory started
#   ceph_rgw.sh destroy            stop, then delete the data directory
#   ceph_rgw.sh kill SITE DAEMON   kill -9 one daemon (DAEMON: mon, osd, rgw)
#   ceph_rgw.sh up SITE DAEMON     start that one daemon again
#   ceph_rgw.sh admin SITE ARGS..  radosgw-admin on that site
#   ceph_rgw.sh ceph SITE ARGS..   ceph on that site
#   ceph_rgw.sh rados SITE ARGS..  rados on that site: objects behind the gateway
#   ceph_rgw.sh wait-sync [SECS]   multisite only: wait until metadata and data
#                                  sync of site b report no shard behind
#
# Settings (environment; start remembers them in DIR/settings, every other
# command reads them from there, so only CEPH_RGW_DIR must be given again):
#   CEPH_RGW_DIR        data directory            (default ${TMPDIR:-/tmp}/ceph-rgw)
#   CEPH_RGW_MODE       single | pair | multisite (default pair)
#                         single     one store, site a
#                         pair       two independent stores a and b; nothing is
#                                    synced between them, but both write all the
#                                    change logs (metadata, data, bucket index)
#                         multisite  one realm: a is the master zone, b follows it
#                                    (Ceph's own replication: the peer to compare)
#   CEPH_RGW_PORT       S3 port of site a; b gets the next one     (default 8101)
#   CEPH_RGW_MON_PORT   monitor port of site a; b gets the next one (default 17101)
#   CEPH_RGW_ADVERTISE_A / _B
#                       zone endpoint URL told to the other zone (default: the S3
#                       port itself; point it at a metering or delaying proxy to
#                       measure what crosses between the regions)
#   CEPH_RGW_STORE      bluestore (file-backed, survives kill -9; default) or
#                       memstore (RAM only, lost on kill -9)
#   CEPH_RGW_DISK_GB    size of the sparse bluestore file       (default 20)
#   CEPH_RGW_OSD_MEM_MB OSD memory target                       (default 1024)
#   CEPH_RGW_LOG_SHARDS data-log and metadata-log shards        (default: Ceph's,
#                       128 and 64; a small number makes quiet test logs easy to read)
#   CEPH_RGW_SYNC_POLL  multisite: seconds between polls of an idle log (default: Ceph's, 20)
#   CEPH_RGW_SYNC_LEASE multisite: seconds a sync lease lasts (default: Ceph's, 120). After a
#                       gateway is stopped or killed, the next one cannot go on syncing until
#                       the old lease runs out, while "sync status" may say "caught up".
#   CEPH_RGW_TIMEOUT    bound in seconds on each wait           (default 90)
#
# Exit codes: 0 good, 1 failed, 2 wrong use, 3 something is not installed.
set -u
PROG=${0##*/}
DIR=${CEPH_RGW_DIR:-${TMPDIR:-/tmp}/ceph-rgw}
IP=127.0.0.1
SYS_KEY=SYSTEMACCESSKEY00001 SYS_SECRET=systemsecretsystemsecretsystemsecret0001
APP_KEY=APPACCESSKEY00000001 APP_SECRET=appsecretappsecretappsecretappsecret0001
ADM_KEY=ADMACCESSKEY00000001 ADM_SECRET=admsecretadmsecretadmsecretadmsecret0001

say()  { printf '%s: %s\n' "$PROG" "$*" >&2; }
die()  { local rc=$1; shift; say "error: $*"; exit "$rc"; }
now()  { date +%s.%N; }
since(){ awk -v a="$1" -v b="$(now)" 'BEGIN{printf "%.1f", b-a}'; }

settings() {
    # Remembered settings win over defaults; the environment counts at the first start only.
    if [ "${1:-}" != start ] || [ -f "$DIR/settings" ]; then
        [ -f "$DIR/settings" ] || return 1
        # shellcheck disable=SC1091
        . "$DIR/settings"
        return 0
    fi
    MODE=${CEPH_RGW_MODE:-pair}
    PORT=${CEPH_RGW_PORT:-8101}
    MONPORT=${CEPH_RGW_MON_PORT:-17101}
    ADV_A=${CEPH_RGW_ADVERTISE_A:-http://$IP:$PORT}
    ADV_B=${CEPH_RGW_ADVERTISE_B:-http://$IP:$((PORT+1))}
    STORE=${CEPH_RGW_STORE:-bluestore}
    DISK_GB=${CEPH_RGW_DISK_GB:-20}
    OSD_MEM_MB=${CEPH_RGW_OSD_MEM_MB:-1024}
    LOG_SHARDS=${CEPH_RGW_LOG_SHARDS:-}
    SYNC_POLL=${CEPH_RGW_SYNC_POLL:-}
    SYNC_LEASE=${CEPH_RGW_SYNC_LEASE:-}
    TIMEOUT=${CEPH_RGW_TIMEOUT:-90}
    case $MODE in single|pair|multisite) ;; *) die 2 "CEPH_RGW_MODE must be single, pair or multisite, not '$MODE'";; esac
    case $STORE in bluestore|memstore) ;; *) die 2 "CEPH_RGW_STORE must be bluestore or memstore, not '$STORE'";; esac
    local n v
    for n in PORT MONPORT DISK_GB OSD_MEM_MB TIMEOUT; do
        v=${!n}; case $v in ''|*[!0-9]*) die 2 "$n must be a whole number, not '$v'";; esac
    done
}
sites()   { if [ "$MODE" = single ]; then echo a; else echo a b; fi; }
s3port()  { if [ "$1" = a ]; then echo "$PORT"; else echo $((PORT+1)); fi; }
monport() { if [ "$1" = a ]; then echo "$MONPORT"; else echo $((MONPORT+1)); fi; }
adv()     { if [ "$1" = a ]; then echo "$ADV_A"; else echo "$ADV_B"; fi; }
realm()   { if [ "$MODE" = multisite ]; then echo realm; else echo "realm-$1"; fi; }
zgroup()  { if [ "$MODE" = multisite ]; then echo zg; else echo "zg-$1"; fi; }
zone()    { echo "zone-$1"; }
conf()    { echo "$DIR/$1/ceph.conf"; }
check_site() { case " $(sites) " in *" $1 "*) ;; *) die 2 "no site '$1' (sites: $(sites))";; esac; }

pidfile() { echo "$DIR/$1/run/$2.pid"; }
alive() {   # alive SITE DAEMON: running, not a zombie, and still our daemon
    local p st; p=$(cat "$(pidfile "$1" "$2")" 2>/dev/null) || return 1
    [ -n "$p" ] && [ -r "/proc/$p/stat" ] || return 1
    st=$(sed 's/.*) //' "/proc/$p/stat" 2>/dev/null | cut -c1)
    [ "$st" != Z ] || return 1
    tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null | grep -qF "$DIR/$1/"
}
wait_for() { # wait_for SECS WHAT CMD...: bounded wait with a clear error
    local secs=$1 what=$2 end; shift 2; end=$(( $(date +%s) + secs ))
    until "$@" >/dev/null 2>&1; do
        [ "$(date +%s)" -lt "$end" ] || { say "error: gave up after ${secs}s waiting for $what"; return 1; }
        sleep 0.2
    done
}
gone() { ! alive "$1" "$2"; }
stop_one() {
    local s=$1 d=$2 p; alive "$s" "$d" || { rm -f "$(pidfile "$s" "$d")"; return 0; }
    p=$(cat "$(pidfile "$s" "$d")"); kill "$p" 2>/dev/null
    if ! wait_for 20 "$d of site $s (pid $p) to stop" gone "$s" "$d" 2>/dev/null; then
        say "site $s: $d (pid $p) ignored SIGTERM for 20s, killing it"; kill -9 "$p" 2>/dev/null
        wait_for 10 "$d of site $s (pid $p) to die" gone "$s" "$d" || return 1
    fi
    rm -f "$(pidfile "$s" "$d")"
}
port_free() { ! (exec 3<>"/dev/tcp/$IP/$1") 2>/dev/null; }
last_log()  { say "--- end of $1"; tail -n 15 "$1" >&2 2>/dev/null; }

C()  { local s=$1; shift; timeout "$TIMEOUT" ceph -c "$(conf "$s")" --connect-timeout 20 "$@"; }
RA() { local s=$1; shift; timeout "$TIMEOUT" radosgw-admin -c "$(conf "$s")" "$@"; }
RUN(){ # RUN SITE WHAT CMD...: run quietly, show the output only when it fails
    local s=$1 what=$2 out rc; shift 2
    out=$("$@" 2>&1); rc=$?
    [ $rc -eq 0 ] || { say "site $s: $what failed (exit $rc):"; printf '%s\n' "$out" | tail -n 15 >&2; return 1; }
}
mon_ok() { C "$1" quorum_status; }
osd_ok() { C "$1" osd stat | grep -q ' 1 up'; }
rgw_ok() { curl -fsS -m 5 -o /dev/null "http://$IP:$(s3port "$1")/"; }

start_mon() {
    alive "$1" mon && return 0
    wait_for 15 "port $(monport "$1") to be free (monitor of site $1)" port_free "$(monport "$1")" || return 1
    RUN "$1" "starting the monitor" ceph-mon -c "$(conf "$1")" -i a || return 1
    wait_for "$TIMEOUT" "the monitor of site $1" mon_ok "$1" || { last_log "$DIR/$1/log/mon.log"; return 1; }
}
start_osd() {
    alive "$1" osd && return 0
    RUN "$1" "starting the osd" ceph-osd -c "$(conf "$1")" -i 0 || return 1
    wait_for "$TIMEOUT" "the osd of site $1 to be up" osd_ok "$1" || { last_log "$DIR/$1/log/osd.log"; return 1; }
}
start_rgw() {
    alive "$1" rgw && return 0
    # A killed daemon's threads may hold the port a moment longer than its process seems to live.
    wait_for 15 "port $(s3port "$1") to be free (S3 port of site $1)" port_free "$(s3port "$1")" || return 1
    RUN "$1" "starting radosgw" radosgw -c "$(conf "$1")" -n client.rgw || return 1
    wait_for "$TIMEOUT" "radosgw of site $1 to answer" rgw_ok "$1" || { last_log "$DIR/$1/log/rgw.log"; return 1; }
}

write_conf() {
    local s=$1 d=$DIR/$1 fsid=$2
    cat >"$(conf "$s")" <<CONF
[global]
fsid = $fsid
mon host = [v2:$IP:$(monport "$s")/0]
public addr = $IP
cluster addr = $IP
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = $d/keyring
run dir = $d/run
admin socket = $d/run/\$name.\$pid.asok
crash dir = $d/log
heartbeat file = $d/run/\$name.hb
log max recent = 500
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool delete = true
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 2000
mon data avail warn = 2
mon data avail crit = 1

[mon]
mon data = $d/mon
pid file = $d/run/mon.pid
log file = $d/log/mon.log
mon cluster log file = $d/log/cluster.log

[osd]
osd data = $d/osd
keyring = $d/osd/keyring
pid file = $d/run/osd.pid
log file = $d/log/osd.log
osd objectstore = $STORE
osd memory target = $((OSD_MEM_MB * 1048576))
bluestore block size = $((DISK_GB * 1073741824))
bluestore block create = true
memstore device bytes = $((DISK_GB * 1073741824))
osd max object name len = 2048
osd client watch timeout = 6
osd fast shutdown = $([ "$STORE" = memstore ] && echo false || echo true)
osd class load list = *
osd class default list = *

[client]
admin socket = $d/run/\$name.\$pid.\$cctid.asok
log file = $d/log/client.log
rgw realm = $(realm "$s")
rgw zonegroup = $(zgroup "$s")
rgw zone = $(zone "$s")

[client.rgw]
pid file = $d/run/rgw.pid
log file = $d/log/rgw.log
rgw frontends = beast endpoint=$IP:$(s3port "$s")
rgw dns name = localhost
rgw thread pool size = 128
rgw enable usage log = true
rgw usage log tick interval = 5
CONF
    if [ -n "$LOG_SHARDS" ]; then
        sed -i "/^rgw realm/i rgw data log num shards = $LOG_SHARDS\nrgw md log max shards = $LOG_SHARDS" "$(conf "$s")"
    fi
    if [ "$MODE" != multisite ]; then   # whoever follows the logs trims them, through the admin API
        sed -i '/^rgw realm/i rgw sync log trim interval = 0' "$(conf "$s")"
    fi
    if [ -n "$SYNC_LEASE" ]; then
        sed -i "/^rgw realm/i rgw sync lease period = $SYNC_LEASE" "$(conf "$s")"
    fi
    if [ -n "$SYNC_POLL" ]; then
        sed -i "/^rgw realm/i rgw sync data poll interval = $SYNC_POLL\nrgw sync meta poll interval = $SYNC_POLL" "$(conf "$s")"
    fi
}
make_cluster() { # monitor and osd, from nothing
    local s=$1 d=$DIR/$1 fsid uuid secret c; c=$(conf "$s")
    mkdir -p "$d/mon" "$d/osd" "$d/run" "$d/log" || return 1
    fsid=$(uuidgen) uuid=$(uuidgen)
    write_conf "$s" "$fsid"
    RUN "$s" "making keys" ceph-authtool --create-keyring "$d/keyring" --gen-key -n mon. --cap mon 'allow *' &&
    RUN "$s" "making keys" ceph-authtool "$d/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' &&
    RUN "$s" "making keys" ceph-authtool "$d/keyring" --gen-key -n client.rgw --cap mon 'allow rwx' --cap osd 'allow rwx' &&
    RUN "$s" "making the monitor map" monmaptool --create --clobber --addv a "[v2:$IP:$(monport "$s")]" --fsid "$fsid" "$d/monmap" &&
    RUN "$s" "making the monitor store" ceph-mon -c "$c" -i a --mkfs --monmap "$d/monmap" --keyring "$d/keyring" &&
    start_mon "$s" || return 1
    RUN "$s" "adding the radosgw key" C "$s" auth import -i "$d/keyring" || return 1
    RUN "$s" "osd full ratios" C "$s" osd set-full-ratio 0.97 || return 1   # small shared disks
    RUN "$s" "osd full ratios" C "$s" osd set-backfillfull-ratio 0.96 || return 1
    RUN "$s" "osd full ratios" C "$s" osd set-nearfull-ratio 0.95 || return 1
    secret=$(ceph-authtool --gen-print-key)
    printf '{"cephx_secret":"%s"}\n' "$secret" >"$d/osd.secret"
    RUN "$s" "registering the osd" C "$s" osd new "$uuid" -i "$d/osd.secret" || return 1
    rm -f "$d/osd.secret"
    RUN "$s" "making the osd key" ceph-authtool --create-keyring "$d/osd/keyring" -n osd.0 --add-key "$secret" &&
    RUN "$s" "making the osd store" ceph-osd -c "$c" -i 0 --mkfs --osd-uuid "$uuid" &&
    start_osd "$s"
}
keep_logs() { # nothing of Ceph's follows these stores: make them log all changes for an outside follower
    # The data and bucket-index logs need log_data; the metadata log needs a second zone. The zone
    # "follower" is only a name (it has no server): it stands for the replicator that reads the logs.
    local s=$1 f=$DIR/$1/zonegroup.json
    RUN "$s" "adding the zone follower" RA "$s" zone create --rgw-zonegroup="$(zgroup "$s")" --rgw-zone=follower --endpoints=http://$IP:1 &&
    RUN "$s" "stopping pulls from follower" RA "$s" zone modify --rgw-zone="$(zone "$s")" --sync-from-all=false || return 1
    RA "$s" zonegroup get >"$f" 2>/dev/null || { say "site $s: zonegroup get failed"; return 1; }
    sed -i 's/"log_meta": "false"/"log_meta": "true"/; s/"log_data": "false"/"log_data": "true"/' "$f"
    RUN "$s" "turning the change logs on" RA "$s" zonegroup set --infile "$f" --rgw-zonegroup="$(zgroup "$s")"
}
make_users() {
    local s=$1
    RUN "$s" "creating the user app" RA "$s" user create --uid=app --display-name=app --access-key=$APP_KEY --secret=$APP_SECRET --max-buckets=0 &&
    RUN "$s" "creating the user adm" RA "$s" user create --uid=adm --display-name=adm --access-key=$ADM_KEY --secret=$ADM_SECRET \
        --caps='buckets=*;users=*;usage=*;metadata=*;zone=*;bilog=*;datalog=*;mdlog=*'
}
make_master() { # realm, zone group, zone, users: site a always, site b when it is its own store
    local s=$1
    RUN "$s" "realm create"     RA "$s" realm create --rgw-realm="$(realm "$s")" --default &&
    RUN "$s" "zonegroup create" RA "$s" zonegroup create --rgw-zonegroup="$(zgroup "$s")" --endpoints="$(adv "$s")" --master --default &&
    RUN "$s" "zone create"      RA "$s" zone create --rgw-zonegroup="$(zgroup "$s")" --rgw-zone="$(zone "$s")" --endpoints="$(adv "$s")" \
        --access-key=$SYS_KEY --secret=$SYS_SECRET --master --default &&
    RUN "$s" "creating the system user" RA "$s" user create --uid=sync --display-name=sync --access-key=$SYS_KEY --secret=$SYS_SECRET --system || return 1
    if [ "$MODE" != multisite ]; then keep_logs "$s" || return 1; fi
    RUN "$s" "period update" RA "$s" period update --commit
}
make_secondary() { # site b of a multisite realm: pull the realm from a, add a zone
    local s=b
    RUN "$s" "realm pull"  RA "$s" realm pull --url="$ADV_A" --access-key=$SYS_KEY --secret=$SYS_SECRET --rgw-realm=realm --default &&
    RUN "$s" "period pull" RA "$s" period pull --url="$ADV_A" --access-key=$SYS_KEY --secret=$SYS_SECRET &&
    RUN "$s" "zone create" RA "$s" zone create --rgw-zonegroup=zg --rgw-zone="$(zone b)" --endpoints="$ADV_B" \
        --access-key=$SYS_KEY --secret=$SYS_SECRET --default &&
    RUN "$s" "period update" RA "$s" period update --commit      # goes to the master zone by its endpoint
}

need_tools() {
    local t missing=
    for t in ceph ceph-mon ceph-osd radosgw radosgw-admin ceph-authtool monmaptool uuidgen curl; do
        command -v "$t" >/dev/null || missing="$missing $t"
    done
    [ -z "$missing" ] || die 3 "not installed:$missing (run: sh tools/setup.sh peers)"
}
failed() { # a start that fails half way leaves no daemon behind, only the logs
    say "error: $*"; local s d
    for s in b a; do for d in rgw osd mon; do [ ! -d "$DIR/$s/run" ] || stop_one "$s" "$d"; done; done
    exit 1
}
cmd_start() {
    local t0 s fresh=; need_tools; settings start
    [ "$(id -u)" = 0 ] || say "warning: not root; the daemons run as $(id -un)"
    mkdir -p "$DIR" || die 1 "cannot make $DIR"
    DIR=$(cd "$DIR" && pwd)
    if [ "$MODE" != single ] && { [ $((PORT+1)) -eq "$MONPORT" ] || [ "$PORT" -eq "$MONPORT" ]; }; then die 2 "S3 and monitor ports overlap"; fi
    exec 9>"$DIR/lock"; flock -w "$TIMEOUT" 9 || die 1 "another start or stop holds $DIR/lock"
    t0=$(now)
    if [ ! -f "$DIR/settings" ]; then
        fresh=1
        for s in $(sites); do
            port_free "$(s3port "$s")"  || die 1 "port $(s3port "$s") is in use (S3 port of site $s); set CEPH_RGW_PORT"
            port_free "$(monport "$s")" || die 1 "port $(monport "$s") is in use (monitor of site $s); set CEPH_RGW_MON_PORT"
            rm -rf "${DIR:?}/$s"
        done
        for s in $(sites); do
            make_cluster "$s" 9>&- || failed "site $s did not come up; logs in $DIR/$s/log"
        done
        say "monitors and osds up after $(since "$t0")s"
        make_master a 9>&- || failed "site a: realm setup failed; logs in $DIR/a/log"
        start_rgw a 9>&- || failed "site a: radosgw did not start; logs in $DIR/a/log"
        make_users a 9>&- || failed "site a: user setup failed"
        case $MODE in
            pair) make_master b 9>&- || failed "site b: realm setup failed"
                  start_rgw b 9>&- || failed "site b: radosgw did not start; logs in $DIR/b/log"
                  make_users b 9>&- || failed "site b: user setup failed";;
            multisite) make_secondary 9>&- || failed "site b: joining the realm failed"
                  start_rgw b 9>&- || failed "site b: radosgw did not start; logs in $DIR/b/log";;
        esac
        for n in MODE PORT MONPORT ADV_A ADV_B STORE DISK_GB OSD_MEM_MB LOG_SHARDS SYNC_POLL SYNC_LEASE TIMEOUT; do
            printf '%s=%q\n' "$n" "${!n}"
        done >"$DIR/settings.tmp" && mv "$DIR/settings.tmp" "$DIR/settings"
    else
        for s in $(sites); do
            start_mon "$s" 9>&- && start_osd "$s" 9>&- && start_rgw "$s" 9>&- || failed "site $s did not come back; logs in $DIR/$s/log"
        done
    fi
    cmd_env >"$DIR/env"
    say "$MODE up in $(since "$t0")s${fresh:+ (new)}; endpoints and keys: $DIR/env"
}
cmd_env() {
    local s S
    echo "CEPH_RGW_DIR=$DIR"
    echo "CEPH_RGW_MODE=$MODE"
    for s in $(sites); do
        S=$(echo "$s" | tr ab AB)
        echo "RGW_${S}_ENDPOINT=http://$IP:$(s3port "$s")"
        echo "RGW_${S}_ZONE=$(zone "$s")"
        echo "RGW_${S}_CONF=$(conf "$s")"
    done
    echo "RGW_APP_ACCESS_KEY=$APP_KEY"; echo "RGW_APP_SECRET_KEY=$APP_SECRET"
    echo "RGW_ADMIN_ACCESS_KEY=$ADM_KEY"; echo "RGW_ADMIN_SECRET_KEY=$ADM_SECRET"
    echo "RGW_SYSTEM_ACCESS_KEY=$SYS_KEY"; echo "RGW_SYSTEM_SECRET_KEY=$SYS_SECRET"
}
cmd_stop() {
    local s d bad=0
    # Without settings a first start failed half way: stop whatever left a pid file.
    settings || { MODE=pair TIMEOUT=90; [ -d "$DIR" ] || { say "nothing at $DIR"; return 0; }; }
    DIR=$(cd "$DIR" && pwd)
    for s in b a; do for d in rgw osd mon; do
        [ -d "$DIR/$s/run" ] || continue
        stop_one "$s" "$d" || bad=1
    done; done
    [ $bad = 0 ] && say "stopped" || return 1
}
cmd_status() {
    local s d p bad=0 rss
    settings || die 1 "nothing was started at $DIR"
    printf '%-5s %-5s %-8s %8s  %s\n' SITE WHAT PID RSS_MB STATE
    for s in $(sites); do for d in mon osd rgw; do
        if alive "$s" "$d"; then
            p=$(cat "$(pidfile "$s" "$d")"); rss=$(awk '/VmRSS/{printf "%.0f",$2/1024}' "/proc/$p/status")
            if "${d}_ok" "$s" >/dev/null 2>&1; then d2=up; else d2="running, not answering"; bad=1; fi
        else p=-; rss=-; d2=down; bad=1; fi
        printf '%-5s %-5s %-8s %8s  %s\n' "$s" "$d" "$p" "$rss" "$d2"
    done; done
    for s in $(sites); do echo "site $s: http://$IP:$(s3port "$s") realm $(realm "$s") zone $(zone "$s") disk $(du -sm "$DIR/$s" | cut -f1) MB"; done
    if [ "$MODE" = multisite ] && [ $bad = 0 ]; then RA b sync status 2>/dev/null; fi
    return $bad
}
caught_up() {
    local o; o=$(RA b sync status 2>/dev/null) || return 1
    printf '%s' "$o" | grep -q 'metadata is caught up with master' &&
    printf '%s' "$o" | grep -q 'data is caught up with source'
}
main() {
    local cmd=${1:-help}; [ $# -gt 0 ] && shift
    case $cmd in
        start)   cmd_start;;
        stop)    cmd_stop;;
        status)  cmd_status;;
        env)     settings || die 1 "nothing was started at $DIR"; cmd_env;;
        destroy) cmd_stop || exit 1
                 [ ! -e "$DIR" ] || [ -f "$DIR/settings" ] || [ -f "$DIR/lock" ] || die 1 "$DIR was not made by $PROG; not deleting it"
                 rm -rf "${DIR:?}";;
        kill)    settings || die 1 "nothing was started at $DIR"; [ $# = 2 ] || die 2 "kill SITE DAEMON"; check_site "$1"
                 alive "$1" "$2" || die 1 "site $1: $2 is not running"
                 kill -9 "$(cat "$(pidfile "$1" "$2")")"; wait_for 10 "$2 of site $1 to die" gone "$1" "$2";;
        up)      settings || die 1 "nothing was started at $DIR"; [ $# = 2 ] || die 2 "up SITE DAEMON"; check_site "$1"
                 case $2 in mon|osd|rgw) "start_$2" "$1";; *) die 2 "no daemon '$2'";; esac;;
        admin)   settings || die 1 "nothing was started at $DIR"; [ $# -ge 2 ] || die 2 "admin SITE ARGS.."; check_site "$1"
                 local s=$1; shift; RA "$s" "$@";;
        ceph)    settings || die 1 "nothing was started at $DIR"; [ $# -ge 2 ] || die 2 "ceph SITE ARGS.."; check_site "$1"
                 local s=$1; shift; C "$s" "$@";;
        rados)   settings || die 1 "nothing was started at $DIR"; [ $# -ge 2 ] || die 2 "rados SITE ARGS.."; check_site "$1"
                 local s=$1; shift; timeout "$TIMEOUT" rados -c "$(conf "$s")" "$@";;
        wait-sync) settings || die 1 "nothing was started at $DIR"; [ "$MODE" = multisite ] || die 2 "wait-sync is for multisite"
                 wait_for "${1:-$TIMEOUT}" "site b to catch up" caught_up || { RA b sync status >&2; exit 1; };;
        help|-h|--help) sed -n '2,/^set -u/p' "$0" | sed '$d; s/^# \{0,1\}//';;
        *) die 2 "no command '$cmd' (see $PROG help)";;
    esac
}
main "$@"
