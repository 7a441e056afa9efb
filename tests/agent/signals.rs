//! Signals of the process: none is handled on kvferry's threads.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;

use crate::common::agent::{Node, assert_same, config, plan, until};
use crate::common::alone::alone;
use crate::common::memory::pattern_bytes;
use kvferry::agent::{AgentConfig, Direction, Transport};
use kvferry::net::{Address, Listener, ListenerConfig};

const LEN: usize = 32 << 20;

/// The names of this process's threads and the signals that each blocks, a bit for each from 1 on, by their numbers.
fn threads() -> BTreeMap<String, (String, u64)> {
    let field = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().to_owned()
    };
    let thread = |entry: fs::DirEntry| {
        // One that ends meanwhile is left out.
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let blocked = u64::from_str_radix(&field(&status, "SigBlk"), 16).unwrap();
        Some((entry.file_name().into_string().unwrap(), (field(&status, "Name"), blocked)))
    };
    fs::read_dir("/proc/self/task").unwrap().filter_map(|entry| thread(entry.unwrap())).collect()
}

#[test]
fn every_thread_of_kvferry_blocks_signals() {
    alone!();
    let before = threads();
    let place = tempfile("metrics");
    let settings = AgentConfig { metrics_file: Some(place.clone().into()), ..config("a", Transport::Shm) };
    let mut a = Node::start(settings, 1, &[LEN]);
    let b = Node::start(config("b", Transport::Shm), 2, &[LEN]);
    let address = Address { bind: Ipv4Addr::LOCALHOST.into(), advertise: Ipv4Addr::LOCALHOST.into(), note: None };
    let listener_config = ListenerConfig { address, port: 0, pushes: false };
    let mut listener = Listener::bind(&listener_config, |request| request.to_vec()).unwrap();
    let peer = a.connect(&b.agent.metadata().unwrap());
    a.wait_connected();
    let blocks: Vec<u32> = (0..LEN as u32 / 4096).collect();
    let mut ours = BTreeMap::new();
    until("the threads are there", || {
        a.move_all(peer, Direction::Read, plan(0, 0, 4096, 4096, blocks.clone(), blocks.clone()));
        ours.extend(threads().into_iter().filter(|(number, _)| !before.contains_key(number)));
        let names = ["kvf-progress", "kvf-listener", "kvf-metrics", "kvf-copy"];
        names.iter().all(|name| ours.values().any(|(known, _)| known == name))
    });
    assert_same("read", &a.contents(), &[pattern_bytes(2, LEN)]);
    let signals = [libc::SIGINT, libc::SIGTERM, libc::SIGCHLD, libc::SIGALRM, libc::SIGPROF, libc::SIGPIPE];
    let open: Vec<_> =
        ours.values().filter(|(_, blocked)| signals.iter().any(|signal| blocked >> (signal - 1) & 1 == 0)).collect();
    assert!(open.is_empty(), "threads that handle signals: {open:x?}");
    listener.shutdown();
    drop(a);
    fs::remove_file(place).unwrap();
}

/// A file of this process's in the folder for temporary ones.
fn tempfile(name: &str) -> String {
    std::env::temp_dir().join(format!("kvferry-{name}-{}", std::process::id())).into_os_string().into_string().unwrap()
}
