#!/bin/sh
# A certificate for one process or operator, and at the first call the authority that signs it.
#
# Usage: certificates.sh FOLDER ROLE/NAME [HOST...]
#
# ROLE/NAME is datanode/UUID, controller/NAME, operator/NAME or verifier/NAME. HOST is each name and address by which
# others reach a process; an operator has none. In FOLDER are then ca.pem and ca.key, and ROLE-NAME.pem and .key. Keep
# ca.key where no process runs. A second call for one ROLE/NAME renews the certificate, with a new key.
set -eu
umask 077

[ $# -ge 2 ] || { sed -n 's/^# \(Usage.*\)/\1/p' "$0" >&2; exit 2; }
folder=$1 identity=$2
shift 2
case $identity in
    *[!A-Za-z0-9._@/-]* | */*/* | */) echo "$identity: not ROLE/NAME" >&2; exit 2 ;;
    datanode/????????-????-????-????-???????????? | controller/* | operator/* | verifier/*) ;;
    *) echo "$identity: not ROLE/NAME, with datanode (and a UUID), controller, operator or verifier" >&2; exit 2 ;;
esac
names="URI:treefold:$identity"
for host; do
    case $host in
        '' | *[!A-Za-z0-9.:-]*) echo "$host: not a host" >&2; exit 2 ;;
        *:* | *[0-9].*[0-9].*[0-9].*[0-9]) kind=IP ;;
        *) kind=DNS ;;
    esac
    names="$names,$kind:$host"
done

mkdir -p "$folder"
# In the same folder, so that `mv` renames: nobody finds a key without its certificate, or half of either.
made=$(mktemp -d "$folder/made.XXXXXX")
trap 'rm -rf "$made"' EXIT

key() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$1"
}

if [ ! -e "$folder/ca.pem" ]; then
    key "$made/ca.key"
    openssl req -x509 -new -key "$made/ca.key" -days 3650 -subj "/CN=Treefold authority" -out "$made/ca.pem"
    mv "$made/ca.key" "$folder/ca.key"
    mv "$made/ca.pem" "$folder/ca.pem"
    chmod 644 "$folder/ca.pem"
fi

key "$made/key"
openssl req -new -key "$made/key" -subj "/CN=${identity#*/}" -out "$made/request"
cat > "$made/extensions" <<END
subjectAltName = $names
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
END
openssl x509 -req -in "$made/request" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -sha256 -days 365 \
    -set_serial "0x$(openssl rand -hex 16)" -extfile "$made/extensions" -out "$made/pem" 2> "$made/log" ||
    { cat "$made/log" >&2; exit 1; }
file=$folder/$(echo "$identity" | tr / -)
mv "$made/key" "$file.key"
mv "$made/pem" "$file.pem"
chmod 644 "$file.pem"
echo "$file.pem"
