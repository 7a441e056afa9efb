//! Sends an agent mutated active messages, as `scripts/chaos garbage` asks: an example of what a stranger can do who
//! reaches the agent's port and knows its metadata.
//!
//! usage: garbage_sender METADATA_FILE COUNT SEED
//!
//! It says a valid hello first and keeps its numbers right, so that most messages get past the header. Then it changes
//! bits, lengths, numbers and kinds of valid messages, repeats old ones, and comes again under other names. It never
//! asks for a write that would be right: that is the service, not an attack.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::process::exit;
use std::rc::Rc;
use std::time::{Duration, Instant};

use kvferry::agent::decode_metadata;
use kvferry::proto::ids::{EngineId, Incarnation, RankId, RequestId};
use kvferry::proto::wire::{Message, OLDEST, PeerMessage, Reader, Verdict, encode};
use kvferry::ucx::{Context, ContextConfig, Endpoint, Posted, Worker, WorkerOptions};
use serde::Serialize;

const AM_ID: u16 = 0x4b;
/// Messages that UCX may hold.
const WINDOW: usize = 64;
/// Messages under one name.
const LIFE: u64 = 4000;

#[derive(Serialize)]
struct Hello {
    name: String,
    incarnation: Incarnation,
    connection: u64,
    seen: Option<u64>,
    #[serde(with = "serde_bytes")]
    address: Vec<u8>,
}

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 11) as usize % end.max(1)
    }
}

fn header(kind: u8, incarnation: u64, connection: u64, number: u64) -> Vec<u8> {
    let mut bytes = b"KVFM\x01".to_vec();
    bytes.extend_from_slice(&[kind, 0, 0]);
    for word in [incarnation, connection, number] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn pieces(dice: &mut Dice, write: bool) -> Vec<u8> {
    let count = [1, 2, 64, 3000, 3001][dice.below(5)];
    let mut bytes = (count as u32).to_le_bytes().to_vec();
    for _ in 0..count {
        let region = if dice.below(8) == 0 { dice.next() as u32 } else { 0 };
        let len = [1, 64, 512, 1 << 16][dice.below(4)] as u32;
        let offset = dice.below(1 << 20) as u64 | if write { 1 << 44 } else { 0 };
        bytes.extend_from_slice(&region.to_le_bytes());
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
    }
    bytes
}

fn peer_message(dice: &mut Dice) -> Vec<u8> {
    let request = RequestId::new(format!("garbage-{}", dice.below(64))).unwrap();
    let reader = Reader {
        engine: EngineId::new("garbage").unwrap(),
        incarnation: Incarnation(dice.below(8) as u64),
        rank: RankId { pp: 0, tp: 0 },
    };
    let (lease_id, readers, serial) = (dice.below(4) as u64, dice.next() as u32, dice.next());
    match dice.below(4) {
        0 => PeerMessage::Heartbeat {
            requests: vec![request; 1 + dice.below(100)],
            leases: vec![lease_id; dice.below(100)],
            reader: (dice.below(2) == 0).then_some(reader),
        },
        1 => PeerMessage::Done { request, lease_id, reader, readers, serial, more: dice.below(2) == 0 },
        2 => PeerMessage::Release { request, lease_id, reader, readers },
        _ => PeerMessage::Verdict { request, verdict: Verdict::Valid, serial },
    }
    .to_bytes()
    .unwrap()
}

fn mutate(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..1 + dice.below(4) {
        let len = bytes.len();
        match dice.below(7) {
            0 | 1 if len > 0 => bytes[dice.below(len)] ^= 1 << dice.below(8),
            2 if len > 0 => bytes[dice.below(len)] = [0, 0x7f, 0x80, 0xc1, 0xdd, 0xdf, 0xff][dice.below(7)],
            3 => bytes.truncate(dice.below(len + 1)),
            4 => bytes.extend((0..dice.below(64)).map(|n| n as u8)),
            // Deep: arrays of one element.
            5 => drop(bytes.splice(0..0, std::iter::repeat_n(0x91, 1 + dice.below(200)))),
            _ if len > 8 => {
                let at = dice.below(len - 8);
                let piece: Vec<u8> = bytes[at..at + 8].to_vec();
                bytes.extend(piece);
            }
            _ => {}
        }
    }
}

/// One connection under one name.
struct Life {
    endpoint: Endpoint,
    incarnation: u64,
    connection: u64,
    sequence: u64,
    sent: u64,
    old: Vec<(Vec<u8>, Vec<u8>)>,
}

struct Sender {
    worker: Rc<Worker>,
    address: Vec<u8>,
    target: Vec<u8>,
    dice: Dice,
    pending: usize,
    failed: u64,
}

impl Sender {
    fn hello(&mut self, incarnation: u64, connection: u64) -> Vec<u8> {
        let seen = (self.dice.below(4) == 0).then(|| self.dice.next());
        let hello = Hello {
            name: "garbage".into(),
            incarnation: Incarnation(incarnation),
            connection,
            seen,
            address: self.address.clone(),
        };
        encode("hello", OLDEST, &hello).unwrap()
    }

    fn begin(&mut self) -> Life {
        let endpoint = self.worker.connect(&self.target, "garbage").unwrap();
        let (incarnation, connection) = (self.dice.next() | 1, self.dice.next());
        let mut life = Life { endpoint, incarnation, connection, sequence: 0, sent: 0, old: Vec::new() };
        let hello = Hello {
            name: "garbage".into(),
            incarnation: Incarnation(incarnation),
            connection,
            seen: None,
            address: self.address.clone(),
        };
        let frame = header(1, incarnation, connection, 0);
        self.post(&mut life, frame, encode("hello", OLDEST, &hello).unwrap());
        life
    }

    fn post(&mut self, life: &mut Life, frame: Vec<u8>, data: Vec<u8>) {
        match life.endpoint.send_am(AM_ID, &frame, data, 1) {
            Ok(Posted::Pending) => self.pending += 1,
            Ok(Posted::Done) => {}
            Err(_) => self.failed += 1,
        }
        life.sent += 1;
        let begin = Instant::now();
        loop {
            self.worker.progress();
            while self.worker.poll_completion().is_some() {
                self.pending = self.pending.saturating_sub(1);
            }
            while self.worker.poll_message().is_some() {}
            if self.pending < WINDOW || begin.elapsed() > Duration::from_secs(60) {
                break;
            }
        }
    }

    fn message(&mut self, life: &mut Life) -> (Vec<u8>, Vec<u8>) {
        let (incarnation, connection) = (life.incarnation, life.connection);
        let dice = &mut self.dice;
        let number = dice.next() % 1000;
        let (mut frame, mut data) = match dice.below(12) {
            0..=4 => {
                let frame = header(2, incarnation, connection, life.sequence);
                life.sequence += 1;
                (frame, peer_message(dice))
            }
            5 => (header(4, incarnation, connection, number), pieces(dice, false)),
            6 => {
                let mut data = pieces(dice, true);
                data.extend((0..dice.below(2000)).map(|n| n as u8));
                // The offsets stay out of range whatever is changed: this one is not mutated.
                return (header(6, incarnation, connection, number), data);
            }
            7 => (header(8, incarnation, connection, number), pieces(dice, false)),
            8 => (header([5, 7, 9][dice.below(3)], incarnation, connection, number), vec![0, 1, 2, 3]),
            9 => {
                // Somebody new, or the same again.
                let other = if dice.below(2) == 0 { dice.next() | 1 } else { incarnation };
                let number = dice.next();
                (header(1, other, number, 0), self.hello(other, number))
            }
            10 if !life.old.is_empty() => {
                let at = dice.below(life.old.len());
                return life.old[at].clone();
            }
            _ => {
                let mut long = peer_message(dice);
                if dice.below(50) == 0 {
                    long.resize(1 << 20, 0);
                }
                let ahead = life.sequence + dice.below(5000) as u64;
                (header(2, incarnation, connection, ahead), long)
            }
        };
        let dice = &mut self.dice;
        match dice.below(8) {
            0 => mutate(dice, &mut frame),
            1 => frame[5] = dice.below(12) as u8,
            2 => {}
            _ => mutate(dice, &mut data),
        }
        // A changed kind must not make a write of something that would be right.
        if frame.get(5) == Some(&6) {
            frame[5] = 4;
        }
        frame.truncate(256);
        if life.old.len() < 64 {
            life.old.push((frame.clone(), data.clone()));
        }
        (frame, data)
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, metadata, count, seed] = arguments.as_slice() else {
        eprintln!("usage: garbage_sender METADATA_FILE COUNT SEED");
        exit(2);
    };
    let metadata = decode_metadata(&std::fs::read(metadata).unwrap()).unwrap();
    let count: u64 = count.parse().unwrap();
    let settings = [("RNDV_THRESH", "inf"), ("ADDRESS_VERSION", "v2")];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let config =
        ContextConfig { tls: Some("tcp".into()), settings, name: "garbage".into(), ..ContextConfig::default() };
    let context = Context::new(&config).unwrap();
    let worker =
        Worker::with_options(&context, &WorkerOptions { name: "garbage".into(), max_message: 16 << 20 }).unwrap();
    worker.accept_messages(AM_ID, None).unwrap();
    let address = worker.address().unwrap();
    let dice = Dice(seed.parse::<u64>().unwrap().wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let worker = Rc::new(worker);
    let mut sender =
        Sender { worker: Rc::clone(&worker), address, target: metadata.address.clone(), dice, pending: 0, failed: 0 };
    let (mut life, mut lives, mut sent) = (sender.begin(), 1u64, 0u64);
    while sent < count {
        if life.endpoint.failure().is_some() || life.sent >= LIFE {
            let old = std::mem::replace(&mut life, sender.begin());
            drop(old);
            sender.pending = 0;
            lives += 1;
        }
        let (frame, data) = sender.message(&mut life);
        sender.post(&mut life, frame, data);
        sent += 1;
    }
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        worker.progress();
        while worker.poll_completion().is_some() {}
        while worker.poll_message().is_some() {}
    }
    println!("{{\"sent\": {sent}, \"lives\": {lives}, \"refused\": {}}}", sender.failed);
    // What is open is cut off, as when an attacker goes.
    exit(0);
}
