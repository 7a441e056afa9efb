//! An agent whose process can open no more files for a moment: it is reached again afterwards, by the metadata that peers have.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use crate::common::agent::child::Remote;
use crate::common::agent::{Node, assert_same, config, plan, until};
use kvferry::agent::{Direction, Transport};

/// The sockets by which a process listens at IPv4 addresses, by address: the kernel's number of each.
fn listening(pid: u32) -> BTreeMap<SocketAddr, String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let own: Vec<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (ip, port) = fields.get(1)?.split_once(':')?;
        // As the kernel prints it: the address in this machine's order of bytes.
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
        let number = fields.get(9)?.to_string();
        let is_ours = fields[3] == "0A" && own.contains(&format!("socket:[{number}]"));
        is_ours.then(|| (SocketAddr::from((ip, u16::from_str_radix(port, 16).unwrap())), number))
    };
    table.lines().filter_map(row).collect()
}

fn limit(pid: u32, files: usize) {
    let set = Command::new("prlimit").args([format!("--pid={pid}"), format!("--nofile={files}:")]).status().unwrap();
    assert!(set.success());
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn read_all(node: &mut Node, b: &mut Remote) {
    node.buffers[0].fill(9);
    let peer = node.connect(&b.metadata);
    node.move_all(peer, Direction::Read, plan(0, 0, 1 << 20, 1 << 20, vec![0], vec![0]));
    assert_same("read", &node.contents(), &b.contents());
}

#[test]
fn a_data_port_that_was_lost_is_opened_anew() {
    let mut b = Remote::spawn(Transport::Tcp, 5, &[1 << 20]);
    let mut a = Node::start(config("a", Transport::Tcp), 1, &[1 << 20]);
    read_all(&mut a, &mut b);
    let before = listening(b.pid());
    assert!(!before.is_empty());

    // Strangers take what descriptors are left, and stay.
    limit(b.pid(), descriptors(b.pid()) + 20);
    let strangers: Vec<TcpStream> = (0..60)
        .filter_map(|n| {
            let (address, _) = before.iter().nth(n % before.len())?;
            TcpStream::connect_timeout(address, Duration::from_secs(10)).ok()
        })
        .collect();
    assert!(strangers.len() >= 20);
    until("the data port to be lost", || listening(b.pid()) != before);
    until("the data port to be open again", || {
        let now = listening(b.pid());
        before.keys().all(|address| now.contains_key(address))
    });

    // Who was connected, and who was not.
    let lost = a.wait_for("the loss of the first", |event| match event {
        kvferry::agent::Event::PeerLost { peer, .. } => Some(*peer),
        _ => None,
    });
    assert!(a.agent.route(lost).is_err());
    read_all(&mut a, &mut b);
    let mut c = Node::start(config("c", Transport::Tcp), 1, &[1 << 20]);
    read_all(&mut c, &mut b);
    drop(strangers);
    read_all(&mut c, &mut b);
    b.end();
}
