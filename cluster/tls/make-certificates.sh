#!/usr/bin/env bash
# A private certificate authority, and certificates for the scheduler, the workers (and their nannies) and the clients
# of one Dask cluster. Whoever holds a certificate of this authority may run code on the cluster; nobody else may.
#
#   cluster/tls/make-certificates.sh [-d DAYS] [-n NAME] [-p PREFIX] FOLDER
#
#   FOLDER/ca.pem                        the authority's certificate: on every machine
#   FOLDER/ca-key.pem                    its key: signs further certificates; keep it off the cluster
#   FOLDER/ROLE/ROLE.pem, ROLE-key.pem   certificate and key of scheduler, worker and client
#   FOLDER/ROLE/dask.yaml                Dask's configuration for that role: export DASK_CONFIG=FOLDER/ROLE
#   FOLDER/ROLE/dkrr.yaml                the rest of it: a copy of cluster/dask/dkrr.yaml, which is yours to change
#
# Copy FOLDER/ROLE to the same path on the machines of that role; with -p PREFIX to PREFIX/ROLE, which dask.yaml names.
#
# Certificates are good for 365 days (-d). Run it again on the same FOLDER for new certificates of the same authority;
# the authority itself is never replaced. -n is the authority's name, as certificates show it (dkrr). A client's
# certificate cannot be used to pose as a scheduler or a worker. Needs openssl 1.1.1 or newer.
set -euo pipefail

usage() { sed -n '5p' "$0" | sed 's/^# *//' >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
days=365 name=dkrr prefix=
while getopts d:n:p: option; do
    case $option in
        d) days=$OPTARG ;;
        n) name=$OPTARG ;;
        p) prefix=$OPTARG ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 1 ] || usage
case $days in '' | *[!0-9]* | 0) echo "-d $days: a number of days expected" >&2; exit 2 ;; esac
case $name in '' | *[!A-Za-z0-9._\ -]*) echo "-n $name: letters, digits, spaces, dots and dashes expected" >&2; exit 2 ;; esac
case $prefix in '' | /*) ;; *) echo "-p $prefix: a whole path expected" >&2; exit 2 ;; esac
command -v openssl >/dev/null || { echo "openssl is not installed" >&2; exit 2; }

umask 077   # keys are for their owner alone
mkdir -p "$1"
folder=$(cd "$1" && pwd)
prefix=${prefix:-$folder}
scratch=$(mktemp -d "$folder/.making.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

quiet() { "$@" 2>"$scratch/messages" || { cat "$scratch/messages" >&2; exit 1; }; }
new_key() { quiet openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

if [ ! -e "$folder/ca-key.pem" ]; then
    if [ -e "$folder/ca.pem" ]; then
        echo "$folder/ca.pem has no key beside it: bring ca-key.pem back, or give another folder" >&2
        exit 2
    fi
    new_key "$scratch/ca-key.pem"
    cat >"$scratch/ca.cnf" <<END
[req]
prompt = no
distinguished_name = subject
x509_extensions = authority
[subject]
CN = $name certificate authority
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
END
    quiet openssl req -new -x509 -sha256 -days 3650 -key "$scratch/ca-key.pem" -config "$scratch/ca.cnf" \
        -out "$scratch/ca.pem"
    mv "$scratch/ca.pem" "$folder/ca.pem"
    mv "$scratch/ca-key.pem" "$folder/ca-key.pem"
fi
chmod 644 "$folder/ca.pem"

certificate() {   # certificate ROLE USAGE: scheduler and workers are servers and clients of each other
    local role=$1
    mkdir -p "$folder/$role"
    cat >"$scratch/$role.cnf" <<END
[req]
prompt = no
distinguished_name = subject
[subject]
CN = $name $role
[role]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = $2
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
END
    new_key "$scratch/$role-key.pem"
    quiet openssl req -new -key "$scratch/$role-key.pem" -config "$scratch/$role.cnf" -out "$scratch/$role.csr"
    quiet openssl x509 -req -sha256 -days "$days" -in "$scratch/$role.csr" -CA "$folder/ca.pem" \
        -CAkey "$folder/ca-key.pem" -set_serial "0x01$(openssl rand -hex 15)" -extfile "$scratch/$role.cnf" \
        -extensions role -out "$scratch/$role.pem"
    cp "$folder/ca.pem" "$folder/$role/ca.pem"   # a role's folder is all that its machines need
    mv "$scratch/$role-key.pem" "$folder/$role/$role-key.pem"
    mv "$scratch/$role.pem" "$folder/$role/$role.pem"
    {
        echo "# Dask's configuration for a $role on TLS: export DASK_CONFIG=$prefix/$role"
        echo "distributed:"
        echo "  comm:"
        echo "    default-scheme: tls"
        echo "    require-encryption: true"
        echo "    tls:"
        echo "      ca-file: \"$prefix/$role/ca.pem\""
        # what a worker or a client starts is of the same role: one pair of files serves for all it may be asked for
        for part in scheduler worker client; do
            echo "      $part:"
            echo "        cert: \"$prefix/$role/$role.pem\""
            echo "        key: \"$prefix/$role/$role-key.pem\""
        done
        # their pages of HTTP ask nobody for a certificate, and would tell everybody what runs
        echo "  scheduler:"
        echo "    http:"
        echo "      routes: []"
        echo "  worker:"
        echo "    http:"
        echo "      routes: []"
    } >"$folder/$role/dask.yaml"
    if [ -e "$here/../dask/dkrr.yaml" ] && [ ! -e "$folder/$role/dkrr.yaml" ]; then
        cp "$here/../dask/dkrr.yaml" "$folder/$role/dkrr.yaml"
    fi
}

certificate scheduler "serverAuth, clientAuth"
certificate worker "serverAuth, clientAuth"
certificate client "clientAuth"
echo "certificates for scheduler, worker and client in $folder, good for $days days" >&2
