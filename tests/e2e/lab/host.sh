#!/usr/bin/env bash
# The first process of a host, already in its own namespaces: host.sh NAME STATE_FOLDER PROJECT VENV PYTHON
# It sees this machine's file system, less the project, and with a /root, /tmp, /run, /dev/shm and /mnt of its own.
set -e
name=$1 state=$2/$1 project=$3 venv=$4
hostname "$name"
mount --make-rprivate /
mount -t proc proc /proc

mkdir -p "$state"/{root/.ssh,tmp,kept/venv,kept/python}
chmod 1777 "$state/tmp"
mount --bind "$venv" "$state/kept/venv"
mount --bind "$5" "$state/kept/python"
cp "$2/hostkey" "$state/hostkey"
chmod 600 "$state/hostkey"
# As Debian writes it: the own name leads to a loopback address.
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" > "$state/hosts"
mount --bind "$state/hosts" /etc/hosts
: > "$state/resolv.conf" # no name server: one that does not answer would be waited for
mount --bind "$state/resolv.conf" /etc/resolv.conf
mount -t tmpfs -o size=2g,mode=1777 shm /dev/shm
mount -t tmpfs -o size=16m,mode=755 run /run
mkdir /run/sshd
cp "$state/hostkey" /run/hostkey
mount -t tmpfs -o size=1m mnt /mnt
if [ -e "$state/has_storage" ]; then
  mkdir /mnt/shared
  mount --bind "$2/storage" /mnt/shared
fi
mount --rbind "$state/root" /root
mount --rbind "$state/tmp" /tmp
[ -d "$project" ] && mount -t tmpfs -o size=1m project "$project"
for folder in "$venv:venv" "$5:python"; do # back, where one of the mounts above hides them
  [ -e "${folder%:*}/bin" ] || { mkdir -p "${folder%:*}" && mount --bind "$state/kept/${folder##*:}" "${folder%:*}"; }
done

/usr/sbin/sshd -D -e -f /dev/null -h /run/hostkey -o AuthorizedKeysFile=/root/.ssh/authorized_keys \
  -o StrictModes=no -o UsePAM=no -o PasswordAuthentication=no -o PermitRootLogin=yes -o PidFile=/run/sshd.pid \
  -o MaxStartups=100 -o MaxSessions=100 -o UseDNS=no -o PrintMotd=no &
sshd=$!
set +e
while kill -0 $sshd 2> /dev/null; do wait -n; done # reaps orphans, on which `ray stop` would wait
