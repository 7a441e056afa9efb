#!/bin/busybox sh
# The first process of a virtual machine of scripts/rdma-vm: mounts the host's root, read-only under a layer in memory,
# makes the RDMA devices, and runs /out/command in there. Tells how that ended in /out/code.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "no module $module"; done </modules/order

share() { mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"; }
share host /host ro,cache=loose && share out /out rw && [ -z "$PACKAGES" ] || share packages /packages ro,cache=loose
mount -t tmpfs -o size=75% memory /up
mkdir /up/new /up/work
lower=/host
[ -z "$PACKAGES" ] || lower=/packages:/host
mount -t overlay -o "lowerdir=$lower,upperdir=/up/new,workdir=/up/work" overlay /new
for folder in proc sys dev out; do
  mkdir -p "/new/$folder"
  mount --bind "/$folder" "/new/$folder"
done
mkdir -p /new/dev/shm /new/dev/pts
mount -t tmpfs memory /new/dev/shm
mount -t devpts devpts /new/dev/pts
mount -t tmpfs memory /new/tmp
mount -t tmpfs memory /new/run
chmod 1777 /new/tmp /new/dev/shm
# What the command needs of the host's folders that these hide.
number=0
while read -r needed; do
  upper="/up/needed$number"
  mkdir -p "/new$needed" "$upper/new" "$upper/work"
  # A relative path, because an option's value cannot hold every path as it is.
  cd "/host$needed" && mount -t overlay -o "lowerdir=.,upperdir=$upper/new,workdir=$upper/work" overlay "/new$needed"
  number=$((number + 1))
done </out/needed
cd /

ip link set lo up
for number in 0 1; do
  # Soft RoCE's packets of 4096 bytes and their heads.
  ip link set "eth$number" mtu 4200
  ip link set "eth$number" up
  ip addr add "10.99.$number.$NUMBER/24" dev "eth$number"
  chroot /new rdma link add "rxe$number" type rxe netdev "eth$number"
done
ulimit -l unlimited
echo up >/out/up
chroot /new /bin/bash /out/command >/out/output 2>&1 </dev/null
echo $? >/out/code
dmesg >/out/dmesg
sync
poweroff -f
