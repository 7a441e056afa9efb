//! A peer in a process of its own, driven over its standard input and output.
//!
//! The peer is this test binary again, told by its environment to serve. Each line to it is a command, each of its
//! answers a line that starts with `@`, because the test harness writes to the same output.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;

use kvferry::ucx::{Endpoint, Posted};

use super::super::memory::{hex, mismatch, pattern_bytes, unhex};
use super::{LIMIT, Side, wait};

const ROLE: &str = "KVFERRY_TEST_PEER";

/// The message that carries pattern bytes; its header is the seed.
pub const MESSAGE: u16 = 1;

/// A peer process.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
    pub address: Vec<u8>,
    pub rkey: Vec<u8>,
}

impl Peer {
    /// Starts one whose memory of `len` bytes is filled with the pattern `seed`. `test` is the name of the test
    /// that calls [`serve`].
    pub fn start(test: &str, tls: &str, len: usize, seed: u64) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--ignored"])
            .env(ROLE, format!("{tls} {len} {seed}"))
            // UCX would else write its messages into the middle of answers.
            .env("UCX_LOG_FILE", "stderr")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let answers = lines(child.stdout.take().unwrap());
        let mut peer = Self { child, input, answers, address: Vec::new(), rkey: Vec::new() };
        peer.address = unhex(&peer.answer());
        peer.rkey = unhex(&peer.answer());
        peer
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
        self.input.flush().unwrap();
    }

    /// The next answer, without its `@`. Not to be waited for while the peer needs this side's progress.
    pub fn answer(&mut self) -> String {
        loop {
            let line = self.answers.recv_timeout(LIMIT).expect("the peer did not answer");
            if let Some((_, answer)) = line.split_once('@') {
                return answer.to_owned();
            }
        }
    }

    /// The next answer, with `side` driven while waiting for it.
    pub fn answer_driving(&mut self, side: &Side) -> String {
        wait("the peer's answer", || {
            side.worker.progress();
            match self.answers.try_recv() {
                Ok(line) => line.split_once('@').map(|(_, answer)| answer.to_owned()),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => panic!("the peer has ended"),
            }
        })
    }

    /// Kills it as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks it to end and demands that it ends well.
    pub fn quit(mut self) {
        self.tell("quit");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines(source: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(source).lines() {
            let Ok(line) = line else { return };
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// What the peer process does, until it is told to quit or its input ends.
pub fn serve() {
    let Ok(role) = env::var(ROLE) else {
        panic!("this is the body of the peer processes that the other tests start");
    };
    let words: Vec<&str> = role.split(' ').collect();
    let (tls, len, seed) = (words[0], words[1].parse().unwrap(), words[2].parse().unwrap());
    let side = Side::new(tls, len);
    side.buffer.fill(seed);
    side.worker.accept_messages(MESSAGE, None).unwrap();
    println!("\n@{}", hex(&side.worker.address().unwrap()));
    println!("@{}", hex(&side.memory.pack_rkey().unwrap()));
    let commands = lines(std::io::stdin());
    let mut back: Option<Endpoint> = None;
    loop {
        side.worker.progress();
        while let Some(message) = side.worker.poll_message() {
            let seed = u64::from_le_bytes(message.header.as_slice().try_into().unwrap());
            println!("@message {} {:?}", message.data.len(), mismatch(&message.data, seed, 0));
        }
        while let Some(completion) = side.worker.poll_completion() {
            println!("@completion {} {}", completion.token, completion.result.is_ok());
        }
        let command = match commands.try_recv() {
            Ok(command) => command,
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {
                thread::yield_now();
                continue;
            }
        };
        let words: Vec<&str> = command.split(' ').collect();
        match words[0] {
            "quit" => return,
            "fill" => {
                side.buffer.fill(words[1].parse().unwrap());
                println!("@filled");
            }
            "check" => {
                let (seed, first, len): (u64, usize, usize) =
                    (words[1].parse().unwrap(), words[2].parse().unwrap(), words[3].parse().unwrap());
                println!("@checked {:?}", mismatch(&side.buffer.read(first..first + len), seed, first));
            }
            "connect" => {
                back = Some(side.connect(&unhex(words[1])));
                println!("@connected");
            }
            "send" => {
                let (seed, len): (u64, usize) = (words[1].parse().unwrap(), words[2].parse().unwrap());
                let data = pattern_bytes(seed, len);
                let endpoint = back.as_ref().unwrap();
                if endpoint.send_am(MESSAGE, &seed.to_le_bytes(), data, 0).unwrap() == Posted::Done {
                    println!("@completion 0 true");
                }
            }
            other => panic!("unknown command {other:?}"),
        }
    }
}
