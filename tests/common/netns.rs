//! Hosts as network namespaces: each with an address of its own, joined by a bridge.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn run(command: &str) -> Result<(), String> {
    read(command).map(drop)
}

/// What a command prints.
fn read(command: &str) -> Result<String, String> {
    let mut words = command.split(' ');
    let out = Command::new(words.next().unwrap()).args(words).output().map_err(|e| format!("{command}: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    Err(format!("{command}: {}", String::from_utf8_lossy(&out.stderr).trim()))
}

/// Some hosts on one network. The bridge lies in a namespace of its own, so that the machine's own network sees none
/// of it. Dropping removes all.
pub struct Hosts {
    names: Vec<String>,
    /// The addresses, host by host.
    pub addresses: Vec<String>,
}

impl Hosts {
    /// `count` hosts with addresses in 10.77.0.0/24 or in fd77::/64. The error says why this machine has none.
    pub fn new(count: u32, ipv6: bool) -> Result<Hosts, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let tag = format!("kvf{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut hosts = Hosts { names: vec![], addresses: vec![] };
        let switch = format!("{tag}-s");
        hosts.add(&switch)?;
        run(&format!("ip -n {switch} link add br0 type bridge"))?;
        run(&format!("ip -n {switch} link set br0 up"))?;
        for index in 1..=count {
            let name = format!("{tag}-{index}");
            hosts.add(&name)?;
            run(&format!("ip -n {name} link add eth0 type veth peer name port{index} netns {switch}"))?;
            run(&format!("ip -n {switch} link set port{index} master br0 up"))?;
            let (address, bits, flags) =
                if ipv6 { (format!("fd77::{index}"), 64, " nodad") } else { (format!("10.77.0.{index}"), 24, "") };
            run(&format!("ip -n {name} addr add {address}/{bits} dev eth0{flags}"))?;
            run(&format!("ip -n {name} link set eth0 up"))?;
            hosts.addresses.push(address);
        }
        Ok(hosts)
    }

    /// Gives the host numbered from 0 one more address, `address/bits`.
    pub fn add_address(&self, host: usize, address: &str) -> Result<(), String> {
        let flags = if address.contains(':') { " nodad" } else { "" };
        run(&format!("ip -n {} addr add {address} dev eth0{flags}", self.netns(host)))
    }

    /// Gives the host numbered from 0 an interface `name` with `address/bits` that leads to no other host.
    pub fn add_interface(&self, host: usize, name: &str, address: &str) -> Result<(), String> {
        let netns = self.netns(host);
        run(&format!("ip -n {netns} link add {name} type veth peer name p-{name}"))?;
        run(&format!("ip -n {netns} addr add {address} dev {name}"))?;
        run(&format!("ip -n {netns} link set {name} up"))?;
        run(&format!("ip -n {netns} link set p-{name} up"))
    }

    /// Sends what `host` has no route for by eth0.
    pub fn add_default_route(&self, host: usize, by: &str) -> Result<(), String> {
        run(&format!("ip -n {} route add default via {by}", self.netns(host)))
    }

    /// Renames the host's interface eth0.
    pub fn rename(&self, host: usize, name: &str) -> Result<(), String> {
        let netns = self.netns(host);
        run(&format!("ip -n {netns} link set eth0 down"))?;
        run(&format!("ip -n {netns} link set eth0 name {name}"))?;
        run(&format!("ip -n {netns} link set {name} up"))?;
        self.wait_up(host, name)
    }

    /// Moves the host's address, of an IPv4 network, from eth0 to a new bridge `name` that has eth0 as its port.
    pub fn put_on_bridge(&self, host: usize, name: &str) -> Result<(), String> {
        let (netns, address) = (self.netns(host), &self.addresses[host]);
        run(&format!("ip -n {netns} addr del {address}/24 dev eth0"))?;
        run(&format!("ip -n {netns} link add {name} type bridge"))?;
        run(&format!("ip -n {netns} link set eth0 master {name}"))?;
        run(&format!("ip -n {netns} addr add {address}/24 dev {name}"))?;
        run(&format!("ip -n {netns} link set {name} up"))?;
        self.wait_up(host, name)
    }

    /// Waits until the host's interface has a carrier, of which the kernel learns by itself.
    fn wait_up(&self, host: usize, name: &str) -> Result<(), String> {
        let start = Instant::now();
        while !read(&format!("ip -n {} link show dev {name}", self.netns(host)))?.contains(" state UP ") {
            assert!(start.elapsed() < Duration::from_secs(60), "{name} of host {host} does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn add(&mut self, name: &str) -> Result<(), String> {
        run(&format!("ip netns add {name}"))?;
        self.names.push(name.to_owned());
        run(&format!("ip -n {name} link set lo up"))
    }

    /// The namespace of the bridge, through which everything between hosts goes.
    pub fn switch(&self) -> &str {
        &self.names[0]
    }

    /// Lets everything that `host` sends to `address` vanish, as a firewall that drops does: it goes to a hardware
    /// address that nobody has.
    pub fn swallow(&self, host: usize, address: &str) {
        let nobody = "lladdr 02:00:00:00:00:01 nud permanent dev eth0";
        run(&format!("ip -n {} neigh replace {address} {nobody}", self.netns(host))).unwrap();
    }

    /// Lets what `host` sends leave at so many bytes a second, one packet after the other.
    pub fn slow(&self, host: usize, bytes_per_second: u64) -> Result<(), String> {
        let limit = format!("tbf rate {}bit burst 4kb latency 1s", 8 * bytes_per_second);
        run(&format!("tc -n {} qdisc replace dev eth0 root {limit}", self.netns(host)))
    }

    /// The namespace of the host numbered from 0.
    pub fn netns(&self, host: usize) -> &str {
        // The first is the bridge's.
        &self.names[host + 1]
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            if let Err(e) = run(&format!("ip netns del {name}")) {
                eprintln!("{e}");
            }
        }
    }
}
