# SPDX-License-Identifier: BSD-3-Clause
# Two hosts, a and b, with RAILS rails (2 unless set) in one network namespace, for a guest that belongs to nobody else:
# it rearranges the machine's routing. Source it, or run it; as root.
#
#   rail r:  a$r <-> sa$r -- bridge sw$r -- sb$r <-> b$r      rxe_a$r on a$r, rxe_b$r on b$r
#   IPv4 10.0.$r.1 (a) and 10.0.$r.2 (b); GID index 1 is RoCE v2 over IPv4
#
# Before kernel 7.2 rxe works in the initial network namespace only, so both hosts are there; routing rules before the
# local table keep their traffic on the cables. Faults:
#   ip link set sa0 down|up             cable pulled at a: PORT_ERR, PORT_ACTIVE on rxe_a0 alone; routes stay
#   bridge link set dev sa0 state 0|3   silent black hole
#   tc qdisc replace dev a0 root netem loss 100% | pfifo limit 10000
#   ip link set a0 down; rxe_host_up a 0    the interface itself: the kernel forgets its routes, so they are made again

# Addresses' routes and neighbours of one interface. Permanent neighbours: else connecting waits a second for ARP.
rxe_host_up() {
    local host=$1 rail=$2 own=1 peer=2
    [ "$host" = a ] || { own=2; peer=1; }
    local table=$((100 + rail * 2 + own)) netdev=$host$rail
    ip link set "$netdev" up
    ip route replace "10.0.$rail.0/24" dev "$netdev" src "10.0.$rail.$own" table "$table"
    ip route replace local "10.0.$rail.$own" dev "$netdev" table "$table"
    ip neigh replace "10.0.$rail.$peer" lladdr "02:00:00:00:0$rail:0$peer" dev "$netdev" nud permanent
}

rxe_make() {
    local rail host own peer netdev table conf=net.ipv4.conf
    modprobe -a veth bridge sch_netem sch_ingress cls_u32 act_gact rdma_rxe ib_uverbs rdma_ucm ib_umad
    sysctl -qw $conf.all.rp_filter=0 $conf.default.rp_filter=0 $conf.all.accept_local=1 $conf.default.accept_local=1 \
        $conf.all.arp_ignore=1 $conf.all.arp_announce=2
    for rail in $(seq 0 $((${RAILS:-2} - 1))); do
        ip link add "sw$rail" type bridge forward_delay 0 stp_state 0
        ip link set "sw$rail" mtu 4200
        for host in a b; do
            own=1 peer=2
            [ $host = a ] || { own=2; peer=1; }
            netdev=$host$rail table=$((100 + rail * 2 + own))
            ip link add "$netdev" address "02:00:00:00:0$rail:0$own" type veth peer name "s$netdev"
            ip link set "s$netdev" mtu 4200 master "sw$rail" up
            ip addr add "10.0.$rail.$own/24" dev "$netdev" noprefixroute
            ip link set "$netdev" mtu 4200 up
            ip rule add pref $table oif "$netdev" lookup $table
            ip rule add pref $((table + 100)) iif lo from "10.0.$rail.$own" to "10.0.$rail.$peer" lookup $table
            # Without a queue, veth tells the sender that the cable is out, and rxe (6.1) tries again for ever, not letting
            # go of the CPU that is to learn of the lost carrier. A NIC does not know what became of a packet.
            tc qdisc replace dev "$netdev" root pfifo limit 10000
            rxe_host_up $host "$rail"
        done
        ip link set "sw$rail" up
    done
    ip rule add pref 1000 lookup local
    ip rule del pref 0
    for rail in $(seq 0 $((${RAILS:-2} - 1))); do
        for host in a b; do
            rdma link add "rxe_$host$rail" type rxe netdev "$host$rail"
        done
    done
}
