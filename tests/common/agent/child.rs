//! An agent in a process of its own, driven over pipes.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};

use kvferry::agent::{Event, Transport, decode_metadata, encode_metadata};
use kvferry::proto::wire::AgentMetadata;

use super::super::memory::{hex, unhex};
use super::{Node, config};

const ROLE: &str = "KVFERRY_TEST_CHILD";

/// The parent's end.
pub struct Remote {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    pub metadata: AgentMetadata,
}

/// The name of the test in every test binary that becomes the child; it calls [`serve`].
pub const TEST: &str = "child_process";

impl Remote {
    /// Starts this test binary again as an agent with regions of `lens`, filled with `seed`, `seed + 1`, ...
    pub fn spawn(transport: Transport, seed: u64, lens: &[usize]) -> Remote {
        Remote::spawn_with(transport, seed, lens, &[])
    }

    /// As `spawn`, with these environment variables.
    pub fn spawn_with(transport: Transport, seed: u64, lens: &[usize], env: &[(&str, &str)]) -> Remote {
        let transport = match transport {
            Transport::Auto => "auto",
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
        };
        let lens: Vec<String> = lens.iter().map(usize::to_string).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{transport} {seed} {}", lens.join(",")))
            // UCX would else write its messages into the middle of answers.
            .env("UCX_LOG_FILE", "stderr")
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let mut from = BufReader::new(child.stdout.take().unwrap());
        let metadata = decode_metadata(&unhex(&answer(&mut from))).unwrap();
        Remote { child, to, from, metadata }
    }

    pub fn metadata_hex(&self) -> String {
        hex(&encode_metadata(&self.metadata).unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Transfers under way, bytes read, and messages dropped.
    pub fn stats(&mut self) -> [u64; 3] {
        let answer = self.ask("stats");
        let numbers: Vec<u64> = answer.split(' ').map(|number| number.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    }

    pub fn ask(&mut self, command: &str) -> String {
        writeln!(self.to, "{command}").unwrap();
        answer(&mut self.from)
    }

    /// The contents of all its regions.
    pub fn contents(&mut self) -> Vec<Vec<u8>> {
        self.ask("dump").split(',').map(unhex).collect()
    }

    /// Sends it a signal by name, such as `STOP`, and waits until a `STOP` has taken effect.
    pub fn signal(&self, name: &str) {
        let pid = self.child.id();
        let sent = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().unwrap();
        assert!(sent.success());
        let stopped = || {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            tasks.into_iter().all(|task| {
                let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
                stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
            })
        };
        super::until("the child is stopped", || name != "STOP" || stopped());
    }

    /// SIGKILL, and the process is gone when this returns.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks it to shut down, and checks that it ends well.
    pub fn end(mut self) {
        assert_eq!(self.ask("end"), "ended");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // It has ended already unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next line that the child means for us; the test harness prints others.
fn answer(from: &mut impl BufRead) -> String {
    loop {
        let mut line = String::new();
        assert_ne!(from.read_line(&mut line).unwrap(), 0, "the child ended early");
        if let Some((_, text)) = line.trim_end().split_once("ANSWER ") {
            return text.to_owned();
        }
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nANSWER {text}").unwrap();
    out.flush().unwrap();
}

/// The child's life: an agent that answers the parent's commands and returns every message that it gets, reversed.
pub fn serve() {
    let role = std::env::var(ROLE).expect("started by a test, not by hand");
    let mut words = role.split(' ');
    let transport = Transport::parse(words.next().unwrap()).unwrap();
    let seed = words.next().unwrap().parse().unwrap();
    let lens: Vec<usize> =
        words.next().unwrap().split(',').filter(|len| !len.is_empty()).map(|len| len.parse().unwrap()).collect();
    let node = Node::start(config("child", transport), seed, &lens);
    say(&hex(&encode_metadata(&node.agent.metadata().unwrap()).unwrap()));
    let agent = node.agent.clone();
    let lost = Arc::new(Mutex::new(HashMap::new()));
    let losses = Arc::clone(&lost);
    let echo = std::thread::spawn(move || {
        // Ends with the agent: then there are no more events, and waiting returns at once.
        while let Some(event) = agent.wait_event(std::time::Duration::from_secs(3600)) {
            match event {
                Event::Message { peer, mut data } => {
                    data.reverse();
                    let _ = agent.send(peer, data);
                }
                Event::PeerLost { peer, error } => drop(losses.lock().unwrap().insert(peer, error)),
                _ => {}
            }
        }
    });
    for line in std::io::stdin().lock().lines() {
        match line.unwrap().as_str() {
            "dump" => say(&node.contents().iter().map(|bytes| hex(bytes)).collect::<Vec<_>>().join(",")),
            "end" => break,
            command if command.starts_with("pages ") => {
                // Reads all of the first region so many times at once, in pieces of whole pages that do not merge.
                let (count, metadata) = command[6..].split_once(' ').unwrap();
                let metadata = decode_metadata(&unhex(metadata)).unwrap();
                let peer = node.agent.connect(&metadata).unwrap();
                for _ in 0..count.parse().unwrap() {
                    let ids: Vec<u32> = (0..(metadata.regions[0].len / 16_384) as u32).rev().collect();
                    let plan = super::plan(0, 0, 16_384, 12_288, ids.clone(), ids);
                    node.agent.transfer(peer, kvferry::agent::Direction::Read, plan, 0).unwrap();
                }
                super::until("the first bytes", || node.agent.stats().unwrap().served_bytes > 0);
                say("reading");
            }
            "stats" => {
                let stats = node.agent.stats().unwrap();
                say(&format!("{} {} {}", stats.transfers, stats.bytes_read, stats.messages_dropped));
            }
            command if command.starts_with("try ") => {
                // Starts to read all of the first region.
                let metadata = decode_metadata(&unhex(&command[4..])).unwrap();
                let len = metadata.regions[0].len;
                let peer = node.agent.connect(&metadata).unwrap();
                let plan = super::plan(0, 0, len, len, vec![0], vec![0]);
                node.agent.transfer(peer, kvferry::agent::Direction::Read, plan, 0).unwrap();
                say("trying");
            }
            "settle" => {
                super::until("the end of all transfers", || node.agent.stats().unwrap().transfers == 0);
                say("settled");
            }
            command if command.starts_with("read ") => {
                // Reads all of the first region in pieces that do not merge, again and again, until it is killed.
                let metadata = decode_metadata(&unhex(&command[5..])).unwrap();
                let peer = node.agent.connect(&metadata).unwrap();
                let count = (metadata.regions[0].len / 1024) as u32;
                let ids: Vec<u32> = (0..count).rev().collect();
                for _ in 0..64 {
                    let plan = super::plan(0, 0, 1024, 1000, ids.clone(), ids.clone());
                    node.agent.transfer(peer, kvferry::agent::Direction::Read, plan, 0).unwrap();
                }
                super::until("reads", || {
                    assert!(!lost.lock().unwrap().contains_key(&peer), "lost: {:?}", lost.lock().unwrap());
                    let stats = node.agent.stats().unwrap();
                    stats.bytes_read > 0 || stats.operations >= 200
                });
                say("reading");
            }
            other => panic!("unknown command {other}"),
        }
    }
    node.agent.shutdown(super::LIMIT).unwrap();
    echo.join().unwrap();
    say("ended");
}
