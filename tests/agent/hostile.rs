//! Agents and peers that are not what they say: a relayed witness, none at all, rendezvous, and short segments. The
//! hostile peer is this process, with a UCX worker of its own; the agents are children.

use std::path::Path;
use std::time::Instant;

use crate::common::agent::child::Remote;
use crate::common::agent::{LIMIT, Node, assert_same, config, plan};
use crate::common::keys::key_file;
use crate::common::memory::{hex, pattern_bytes};
use crate::common::skip::skipped;
use crate::common::ucx::{Side, wait};
use kvferry::ErrorKind;
use kvferry::agent::{Direction, Transport, encode_metadata};
use kvferry::proto::ids::Incarnation;
use kvferry::proto::wire::{AgentMetadata, MemoryKind, RegionMetadata};
use kvferry::secret::{ENV, Initiator, Key, Protocol, Responder};
use kvferry::ucx::{AmMessage, Endpoint, Status};
use serde::{Deserialize, Serialize};

const AM_ID: u16 = 0x4b;
const LEN: usize = 64 << 10;

/// What docs/protocol.md says of a hello.
#[derive(Serialize, Deserialize, Clone)]
struct Hello {
    name: String,
    incarnation: u64,
    connection: u64,
    seen: Option<u64>,
    #[serde(with = "serde_bytes")]
    address: Vec<u8>,
    process: Option<serde_json::Value>,
    #[serde(default)]
    challenge: Option<(u64, u64)>,
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    magic: String,
    version: u16,
    kind: String,
    body: Hello,
}

fn encode(hello: &Hello) -> Vec<u8> {
    let envelope = Envelope { magic: "kvferry".into(), version: 4, kind: "hello".into(), body: hello.clone() };
    rmp_serde::to_vec_named(&envelope).unwrap()
}

fn decode(bytes: &[u8]) -> Hello {
    rmp_serde::from_slice::<Envelope>(bytes).unwrap().body
}

fn frame(kind: u8, incarnation: u64, connection: u64, number: u64) -> Vec<u8> {
    let words = [incarnation, connection, number].into_iter().flat_map(u64::to_le_bytes);
    b"KVFM".iter().copied().chain([2, kind, 0, 0]).chain(words).collect()
}

fn kind(message: &AmMessage) -> u8 {
    message.header[5]
}

/// A peer that speaks the protocol by itself.
struct Raw {
    side: Side,
    address: Vec<u8>,
}

impl Raw {
    fn new(settings: &str) -> Raw {
        let side = Side::new(settings, LEN);
        side.buffer.fill(50);
        side.worker.accept_messages(AM_ID, None).unwrap();
        let address = side.worker.address().unwrap();
        Raw { side, address }
    }

    fn connect(&self, address: &[u8]) -> Endpoint {
        self.side.worker.connect(address, "").unwrap()
    }

    fn send(&self, to: &Endpoint, header: &[u8], data: Vec<u8>) {
        to.send_am(AM_ID, header, data, 0).unwrap();
    }

    /// The next message of one of these kinds.
    fn hear(&self, kinds: &[u8]) -> AmMessage {
        wait("a message", || {
            self.side.worker.progress();
            self.side.worker.poll_message().filter(|message| kinds.contains(&kind(message)))
        })
    }

    /// Whether the reader asks for bytes by messages. False: its transfer ended without that.
    fn is_asked(&self, reader: &mut Remote) -> bool {
        let end = Instant::now() + LIMIT;
        loop {
            for _ in 0..100 {
                self.side.worker.progress();
                if let Some(message) = self.side.worker.poll_message()
                    && matches!(kind(&message), 4 | 12)
                {
                    return true;
                }
            }
            if reader.stats()[0] == 0 {
                return false;
            }
            assert!(Instant::now() < end, "nobody asks");
        }
    }
}

const SHM: &str = "cma,tcp,self;RNDV_THRESH=inf;ADDRESS_VERSION=v2";

/// The hostile process has the metadata of a third one with its own address in it. To the reader it is the third process,
/// to the third process it is the reader: it passes on what either says of itself.
fn relay(key: Option<(&Path, Key)>) {
    let env: Vec<(&str, &str)> = key.iter().map(|(file, _)| (ENV, file.to_str().unwrap())).collect();
    let third = Remote::spawn_with(Transport::Shm, 30, &[LEN], &env);
    let mut reader = Remote::spawn_with(Transport::Shm, 40, &[LEN], &env);
    let raw = Raw::new(SHM);
    let (third_life, reader_life) = (third.metadata.incarnation.0, reader.metadata.incarnation.0);
    let forged = AgentMetadata { name: "forged".into(), address: raw.address.clone(), ..third.metadata.clone() };
    assert_eq!(reader.ask(&format!("try {}", hex(&encode_metadata(&forged).unwrap()))), "trying");

    let asked = raw.hear(&[1, 10]);
    let (mut responder, said) = match &key {
        None => (None, decode(&asked.data)),
        Some((_, key)) => {
            let (responder, payload) = Responder::read(key, Protocol::Agent, &asked.header, &asked.data).unwrap();
            (Some(responder), decode(&payload[8..]))
        }
    };
    // To the third process.
    let question =
        Hello { incarnation: reader_life, connection: 77, seen: None, address: raw.address.clone(), ..said.clone() };
    let to_third = raw.connect(&third.metadata.address);
    let answer = match &key {
        None => {
            raw.send(&to_third, &frame(1, reader_life, 77, 0), encode(&question));
            decode(&raw.hear(&[1]).data)
        }
        Some((_, key)) => {
            let header = frame(10, reader_life, 77, 1);
            let payload = [third_life.to_le_bytes().to_vec(), encode(&question)].concat();
            let (mut initiator, message) = Initiator::start(key, Protocol::Agent, &header, &payload).unwrap();
            raw.send(&to_third, &header, message);
            decode(&initiator.finish(&raw.hear(&[11]).data).unwrap().0)
        }
    };
    assert!(answer.process.is_some() && answer.incarnation == third_life);
    // To the reader.
    let lie = Hello { connection: 78, seen: Some(said.connection), address: raw.address.clone(), ..answer };
    let to_reader = raw.connect(&reader.metadata.address);
    match responder.take() {
        None => raw.send(&to_reader, &frame(1, third_life, 78, 0), encode(&lie)),
        Some(responder) => {
            let number = u64::from_le_bytes(asked.header[24..].try_into().unwrap());
            let message = responder.answer(&encode(&lie)).unwrap().0;
            raw.send(&to_reader, &frame(11, third_life, 78, number), message);
        }
    }
    let asks = raw.is_asked(&mut reader);
    assert_same("the reader", &reader.contents(), &[pattern_bytes(40, LEN)]);
    assert!(asks, "the reader's transfer ended without a question to its peer");
}

#[test]
fn a_relayed_witness_gets_nobody_the_memory_of_a_third_process() {
    relay(None);
}

#[test]
fn a_relayed_witness_gets_no_holder_of_the_key_the_memory_of_a_third_process() {
    relay(Some((&key_file(7), Key::from_bytes([7; 32]))));
}

/// Clones of a virtual machine can have everything in common by which UCX tells processes apart.
#[test]
fn memory_of_a_process_without_a_witness_is_not_copied_by_ucx_either() {
    for without in [true, false] {
        let mut reader = Remote::spawn(Transport::Shm, 40, &[LEN]);
        let raw = Raw::new(SHM);
        let region = RegionMetadata {
            base: raw.side.buffer.addr(),
            len: LEN as u64,
            kind: MemoryKind::Host,
            rkey: raw.side.memory.pack_rkey().unwrap(),
            handle: None,
            is_scattered: false,
            is_filled_by_kernel: false,
        };
        let metadata = AgentMetadata {
            name: "raw".into(),
            incarnation: Incarnation(9),
            address: raw.address.clone(),
            regions: vec![region],
            ..reader.metadata.clone()
        };
        assert_eq!(reader.ask(&format!("try {}", hex(&encode_metadata(&metadata).unwrap()))), "trying");
        let said = decode(&raw.hear(&[1]).data);
        let mut place = said.process.clone().unwrap();
        place["pid"] = std::process::id().into();
        place["witness"] = raw.side.buffer.addr().into();
        let hello = Hello {
            incarnation: 9,
            connection: 78,
            seen: Some(said.connection),
            address: raw.address.clone(),
            process: (!without).then_some(place),
            ..said
        };
        let to_reader = raw.connect(&reader.metadata.address);
        raw.send(&to_reader, &frame(1, 9, 78, 0), encode(&hello));
        let asks = raw.is_asked(&mut reader);
        assert_same("the reader", &reader.contents(), &[pattern_bytes(40, LEN)]);
        assert!(asks, "the reader's transfer ended without a question to its peer");
    }
}

/// An address that the metadata does not have is another peer's.
#[test]
fn a_hello_from_another_address_than_the_metadata_has_is_refused() {
    let mut reader = Node::start(config("reader", Transport::Tcp), 40, &[LEN]);
    let honest = Remote::spawn(Transport::Tcp, 30, &[LEN]);
    honest.signal("STOP");
    let raw = Raw::new("tcp;RNDV_THRESH=inf;ADDRESS_VERSION=v2");
    let peer = reader.connect(&honest.metadata);
    let life = honest.metadata.incarnation.0;
    let hello = Hello {
        name: "honest".into(),
        incarnation: life,
        connection: 78,
        seen: None,
        address: raw.address.clone(),
        process: None,
        challenge: None,
    };
    let to_reader = raw.connect(&reader.agent.metadata().unwrap().address);
    raw.send(&to_reader, &frame(1, life, 78, 0), encode(&hello));
    wait("the hello's end", || {
        raw.side.worker.progress();
        let stats = reader.agent.stats().unwrap();
        (stats.messages_dropped > 0 || !reader.events.is_empty()).then_some(())
    });
    honest.signal("CONT");
    assert_eq!(reader.wait_connected(), (peer, "child".to_owned()));
    reader.move_all(peer, Direction::Read, plan(0, 0, LEN as u64, LEN as u64, vec![0], vec![0]));
    assert_same("the reader", &reader.contents(), &[pattern_bytes(30, LEN)]);
    honest.end();
}

/// The most resident memory that a process ever had, in bytes.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn announcements_of_large_messages_take_no_memory_and_are_refused() {
    const COUNT: usize = 64;
    let mut target = Remote::spawn(Transport::Tcp, 30, &[LEN]);
    let raw = Raw::new("tcp;RNDV_THRESH=0;ADDRESS_VERSION=v2");
    let endpoint = raw.connect(&target.metadata.address);
    let before = peak(target.pid());
    for token in 0..COUNT {
        let posted = endpoint.send_am(AM_ID, &[0; 32], vec![0; 16 << 20], token as u64).unwrap();
        assert_eq!(posted, kvferry::ucx::Posted::Pending);
    }
    let mut refused = 0;
    for _ in 0..COUNT {
        let end = raw.side.completion().result;
        refused += usize::from(end.is_err_and(|error| error.status == Status::UNSUPPORTED));
    }
    let grown = peak(target.pid()) - before;
    assert!(grown < 128 << 20, "{} MiB more after {COUNT} announcements, {refused} of them refused", grown >> 20);
    assert_eq!(refused, COUNT);
    // The sender's connection is as it was, and so is the target.
    assert_eq!(endpoint.failure(), None);
    assert!(target.stats()[2] >= COUNT as u64);
    let mut other = Node::start(config("other", Transport::Tcp), 40, &[LEN]);
    let peer = other.connect(&target.metadata);
    other.move_all(peer, Direction::Read, plan(0, 0, LEN as u64, LEN as u64, vec![0], vec![0]));
    assert_same("the other", &other.contents(), &[pattern_bytes(30, LEN)]);
    drop(endpoint);
    target.end();
}

/// The region that a child has after `read`: 1000 bytes of each 1024 are the server's.
fn after_reading(reader: u64, server: u64, len: usize) -> Vec<u8> {
    let (mut mine, theirs) = (pattern_bytes(reader, len), pattern_bytes(server, len));
    for (mine, theirs) in mine.chunks_mut(1024).zip(theirs.chunks(1024)) {
        mine[..1000].copy_from_slice(&theirs[..1000]);
    }
    mine
}

/// A network device with an IPv4 route.
fn device_besides_loopback() -> Option<String> {
    let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    let mut names = routes.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    names.find(|name| *name != "lo").map(str::to_owned)
}

/// Segments are 8 KiB by UCX's default and are not told in its addresses of version 1; a sender that does not know that
/// writes over the receiver's memory.
#[test]
fn an_environment_with_older_addresses_or_short_segments_reads_every_byte() {
    const SIZE: usize = 1 << 20;
    let oldest = Path::new(env!("CARGO_MANIFEST_DIR")).join(".deps/ucx-oldest/libucx/lib/libucp.so.0");
    let oldest = oldest.to_str().unwrap();
    let older = [(kvferry::ucx::PATH_VARIABLE, oldest)];
    let newer = [];
    // UCX 1.18 takes no loopback address of 1.22, which chooses between its devices; UCX 1.22 does not unpack the rkeys of
    // 1.18, so that pair is missing.
    let device = device_besides_loopback();
    let on_device = [("UCX_NET_DEVICES", device.as_deref().unwrap_or_default())];
    let mixed = [[&newer[..], &on_device].concat(), [&older[..], &on_device].concat()];
    let mut pairs: Vec<[&[(&str, &str)]; 2]> = vec![[&newer, &newer], [&older, &older]];
    match device {
        Some(_) => pairs.push([&mixed[0], &mixed[1]]),
        None => skipped("two releases of UCX: no network device but lo has a route"),
    }
    let wrong = [("UCX_PROTO_ENABLE", "y"), ("UCX_ADDRESS_VERSION", "v1"), ("UCX_TCP_RX_SEG_SIZE", "8k")];
    for [server_ucx, reader_ucx] in pairs {
        for setting in wrong {
            let mut server = Remote::spawn_with(Transport::Tcp, 30, &[SIZE], server_ucx);
            let mut reader = Remote::spawn_with(Transport::Tcp, 40, &[SIZE], &[reader_ucx, &[setting]].concat());
            assert_eq!(reader.ask(&format!("read {}", server.metadata_hex())), "reading");
            assert_eq!(reader.ask("settle"), "settled");
            let what = format!("{setting:?} {reader_ucx:?} from {server_ucx:?}");
            assert_same(&what, &reader.contents(), &[after_reading(40, 30, SIZE)]);
            assert_same(&what, &server.contents(), &[pattern_bytes(30, SIZE)]);
            reader.end();
            server.end();
        }
    }
}

#[test]
fn a_peer_with_an_older_address_is_refused_by_the_setting() {
    let reader = Node::start(config("reader", Transport::Tcp), 40, &[LEN]);
    let raw = Raw::new("tcp;RNDV_THRESH=inf;ADDRESS_VERSION=v1");
    let metadata = AgentMetadata {
        name: "older".into(),
        incarnation: Incarnation(9),
        address: raw.address.clone(),
        regions: vec![],
        ..reader.agent.metadata().unwrap()
    };
    let error = reader.agent.connect(&metadata).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incompatible, "{error}");
    assert!(error.message().contains("UCX_ADDRESS_VERSION"), "{error}");
    assert_eq!(reader.agent.stats().unwrap().peers, 0);
}
