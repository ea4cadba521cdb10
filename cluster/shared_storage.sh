#!/usr/bin/env bash
# /mnt/shared on every node, where runs are kept. What is mounted there already (EFS, Filestore, your NFS) stays.
#   shared_storage.sh serve          on the head: a folder of its own disk, shared by NFS with the nodes of its network
#   shared_storage.sh mount ADDRESS  on the others
set -euo pipefail
mountpoint -q /mnt/shared && exit
sudo mkdir -p /mnt/shared
case $1 in
  serve)
    dpkg -s nfs-kernel-server &> /dev/null || { sudo apt-get update -q && sudo apt-get install -qy nfs-kernel-server; }
    sudo chmod 1777 /mnt/shared
    echo '/mnt/shared *(rw,async,no_subtree_check,no_root_squash)' | sudo tee /etc/exports > /dev/null
    sudo exportfs -ra
    ;;
  mount)
    dpkg -s nfs-common &> /dev/null || { sudo apt-get update -q && sudo apt-get install -qy nfs-common; }
    sudo mount -t nfs4 -o nfsvers=4.2,hard,timeo=100 "$2:/mnt/shared" /mnt/shared
    ;;
  *) sed -n 2,4p "$0" >&2 && exit 2 ;;
esac
