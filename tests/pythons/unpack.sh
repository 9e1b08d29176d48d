#!/usr/bin/env bash
# Unpacks packages of Debian of another release or for another processor, with what they need, into a folder. Nothing is
# installed, and the lists of packages of this machine stay as they are.
#
# usage: unpack.sh RELEASE ARCHITECTURE FOLDER PACKAGE...     with "source" as architecture, the source of one package
set -euo pipefail

release=$1 architecture=$2 folder=$3
shift 3

state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state"/{lists,archives}/partial "$folder"
touch "$state/status"
# From where this machine has its own packages.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' | sed -n 1p)
trusted="[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
if [ "$architecture" = source ]; then
    echo "deb-src $trusted $mirror $release main" >"$state/sources.list"
else
    echo "deb $trusted $mirror $release main" >"$state/sources.list"
fi
cat >"$state/apt.conf" <<END
Dir::Etc::sourcelist "$state/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$state/lists";
Dir::State::status "$state/status";
Dir::Cache "$state";
Dir::Cache::archives "$state/archives";
APT::Sandbox::User "root";
END
[ "$architecture" = source ] || echo "APT::Architecture \"$architecture\"; APT::Architectures { \"$architecture\"; };" >>"$state/apt.conf"
export APT_CONFIG=$state/apt.conf

apt-get update -q=2
if [ "$architecture" = source ]; then
    # The newest one whose files are there: a release may be ahead of its mirror.
    apt-cache showsrc "$1" | sed -n 's/^Version: //p' | sort -Vru >"$state/versions"
    while read -r version; do
        (cd "$state/archives" && apt-get source -q=2 --download-only "$1=$version") || continue
        tar -x -C "$folder" --strip-components=1 -f "$state"/archives/*.orig.tar.*[!c]
        exit
    done <"$state/versions"
    echo "no source of $1 in $release" >&2
    exit 1
fi
apt-get install -q=2 -y --no-install-recommends --download-only "$@" >/dev/null
for package in "$state"/archives/*.deb; do dpkg-deb -x "$package" "$folder"; done
