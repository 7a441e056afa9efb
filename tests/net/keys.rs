//! Handshakes with a key: who has it gets every byte; who has not, or sends what was captured, gets a refusal and
//! nothing else; and a client with the key takes nothing from a listener without it.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry::ErrorKind;
use kvferry::net::{self, Address, AuthLayer, Listener, ListenerConfig, push};
use kvferry::proto::ids::{EngineId, Incarnation, RankId};
use kvferry::proto::wire::limits::{MAX_RANK_METADATA_BYTES, MAX_REPLY_BYTES};
use kvferry::proto::wire::{EngineShape, HandshakeReply, HandshakeRequest, Message, RankBlob, RefusalCode};
use kvferry::secret::Key;
use serde_bytes::ByteBuf;

const LONG: Duration = Duration::from_secs(300);

/// Stands for all that is the engine's own.
const SECRET: &str = "the-secret-engine";

fn key(byte: u8) -> Key {
    Key::from_bytes([byte; 32])
}

/// What came of the requests that passed.
#[derive(Clone, Default)]
struct Passed {
    count: Arc<AtomicU32>,
    pushes: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Passed {
    /// How many requests passed, for one that is made more than once where the machine is so slow that the client asks
    /// again.
    fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// What an attempt gives of which nothing may pass.
    fn nothing_of<T>(&self, attempt: impl FnOnce() -> T) -> T {
        let before = self.count();
        let result = attempt();
        assert_eq!(self.count(), before);
        result
    }
}

fn blob(len: usize, seed: u8) -> ByteBuf {
    ByteBuf::from((0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 9)) as u8 ^ seed).collect::<Vec<u8>>())
}

/// A listener of an engine with ranks of `lens` bytes of metadata.
fn listener(port: u16, key: Option<Key>, lens: &[usize]) -> (Listener, Passed) {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let address = Address { bind: ip, advertise: ip, note: None };
    let mut auth = AuthLayer::new(key, &address);
    let passed = Passed::default();
    let (count, lens) = (passed.clone(), lens.to_vec());
    let answer = move |request: &[u8]| {
        count.count.fetch_add(1, Ordering::Relaxed);
        match HandshakeRequest::from_bytes(request).unwrap() {
            HandshakeRequest::Query { id, .. } => ranks(id, &lens),
            HandshakeRequest::Push { id, metadata, .. } => {
                count.pushes.lock().unwrap().push(metadata.into_vec());
                HandshakeReply::Pushed { id, missing: 3 }
            }
            HandshakeRequest::Await { .. } => panic!("nothing awaits a prefill"),
        }
        .to_bytes()
        .unwrap()
    };
    let config = ListenerConfig { address, port, pushes: true };
    let listener = Listener::bind(&config, move |request| auth.answer(request, &answer)).unwrap();
    (listener, passed)
}

fn ranks(id: u64, lens: &[usize]) -> HandshakeReply {
    let one =
        |(tp, len): (usize, &usize)| RankBlob { rank: RankId { pp: 0, tp: tp as u32 }, metadata: blob(*len, tp as u8) };
    HandshakeReply::Ranks {
        id,
        engine: EngineId::new(SECRET).unwrap(),
        incarnation: Incarnation(1),
        shape: EngineShape { tp: lens.len() as u32, pp: 1, dcp: 1 },
        ranks: lens.iter().enumerate().map(one).collect(),
    }
}

fn query(key: Option<&Key>, port: u16) -> kvferry::Result<HandshakeReply> {
    net::query(key, "127.0.0.1", port, Some(EngineId::new(SECRET).unwrap()), vec![], LONG)
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|bytes| bytes == needle)
}

#[test]
fn with_the_key_every_byte_arrives() {
    for lens in [vec![], vec![1000], vec![4 << 20; 3], vec![MAX_REPLY_BYTES - 4096]] {
        let (listener, passed) = listener(0, Some(key(1)), &lens);
        assert!(query(Some(&key(1)), listener.port()).unwrap() == ranks(1, &lens), "{lens:?}");
        assert!(passed.count() >= 1);
    }
    let (listener, passed) = listener(0, Some(key(1)), &[10]);
    for len in [0, 65_000, 65_536, MAX_RANK_METADATA_BYTES] {
        let metadata = blob(len, 9).into_vec();
        let missing = push(Some(&key(1)), "127.0.0.1", listener.port(), 4, metadata.clone(), LONG).unwrap();
        assert_eq!(missing, 3);
        assert!(passed.pushes.lock().unwrap().pop().unwrap() == metadata, "{len}");
    }
}

#[test]
fn another_key_or_none_is_refused_on_either_side_and_others_go_on() {
    let (closed, passed) = listener(0, Some(key(1)), &[100]);
    let (open, passed_open) = listener(0, None, &[100]);
    let good = || assert_eq!(query(Some(&key(1)), closed.port()).unwrap(), ranks(1, &[100]));
    good();

    let wrong = passed.nothing_of(|| query(Some(&key(2)), closed.port())).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Incompatible);
    assert!(wrong.message().contains("different keys"), "{wrong}");
    good();

    // The listener's refusal in clear says why and nothing else.
    let refusal = passed.nothing_of(|| query(None, closed.port())).unwrap();
    let HandshakeReply::Refused { id: 0, code: RefusalCode::Key, message } = refusal else { panic!("not refused") };
    assert!(message.contains("key_file") && !message.contains(SECRET), "{message}");
    good();

    let keyless = passed_open.nothing_of(|| query(Some(&key(1)), open.port())).unwrap_err();
    assert_eq!(keyless.kind(), ErrorKind::Incompatible);
    assert!(keyless.message().contains("has no key"), "{keyless}");
    assert_eq!(query(None, open.port()).unwrap(), ranks(1, &[100]));

    for (key, told) in [(Some(key(2)), "different keys"), (None, "key_file")] {
        let pushes = || push(key.as_ref(), "127.0.0.1", closed.port(), 1, vec![7; 100], LONG);
        let pushed = passed.nothing_of(pushes).unwrap_err();
        assert!(pushed.message().contains(told), "{pushed}");
    }
    good();
    assert!(passed.count() >= 4 && passed_open.count() >= 1);
    assert!(passed.pushes.lock().unwrap().is_empty());
}

/// What a relay saw: each frame and whether the client sent it.
type Seen = Arc<Mutex<Vec<(bool, Vec<u8>)>>>;

/// Stands between one client and a listener. `change` gets each frame.
fn relay(to: u16, seen: &Seen, change: impl Fn(Vec<u8>) -> Vec<u8> + Send + 'static) -> u16 {
    let context = zmq::Context::new();
    let front = context.socket(zmq::ROUTER).unwrap();
    front.set_linger(0).unwrap();
    front.bind("tcp://127.0.0.1:*").unwrap();
    let port = front.get_last_endpoint().unwrap().unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    let back = context.socket(zmq::DEALER).unwrap();
    back.set_linger(0).unwrap();
    back.connect(&format!("tcp://127.0.0.1:{to}")).unwrap();
    let seen = Arc::clone(seen);
    std::thread::spawn(move || {
        let mut client = Vec::new();
        loop {
            let mut items = [front.as_poll_item(zmq::POLLIN), back.as_poll_item(zmq::POLLIN)];
            // Nobody has come for a minute: the test is over.
            if zmq::poll(&mut items, 60_000).unwrap() == 0 {
                return;
            }
            let (from_client, from_listener) = (items[0].is_readable(), items[1].is_readable());
            let forward = |sent: bool, frame: Vec<u8>| {
                let changed = change(frame);
                seen.lock().unwrap().push((sent, changed.clone()));
                changed
            };
            if from_client {
                let mut frames = front.recv_multipart(0).unwrap();
                let frame = forward(true, frames.pop().unwrap());
                client = frames.remove(0);
                back.send(frame, 0).unwrap();
            }
            if from_listener {
                let frame = forward(false, back.recv_bytes(0).unwrap());
                front.send_multipart([client.as_slice(), &frame], 0).unwrap();
            }
        }
    });
    port
}

#[test]
fn a_relay_sees_nothing_of_the_engine_with_a_key_and_all_of_it_without() {
    for keyed in [true, false] {
        let key = keyed.then(|| key(1));
        let (listener, passed) = listener(0, key.clone(), &[5000]);
        let seen = Seen::default();
        let port = relay(listener.port(), &seen, |frame| frame);
        assert_eq!(query(key.as_ref(), port).unwrap(), ranks(1, &[5000]));
        assert_eq!(push(key.as_ref(), "127.0.0.1", port, 1, blob(100_000, 5).into_vec(), LONG), Ok(3));
        assert!(passed.count() >= 2);
        let frames: Vec<u8> = seen.lock().unwrap().iter().flat_map(|(_, frame)| frame.clone()).collect();
        for needle in [SECRET.as_bytes(), &blob(5000, 0)[..64], &blob(100_000, 5)[70_000..70_064], b"handshake"] {
            assert_eq!(contains(&frames, needle), !keyed, "{:?}", String::from_utf8_lossy(needle));
        }
    }
}

#[test]
fn damaged_frames_fail_that_request_only() {
    let (listener, passed) = listener(0, Some(key(1)), &[200_000]);
    let good = || assert_eq!(query(Some(&key(1)), listener.port()).unwrap(), ranks(1, &[200_000]));
    // The frames' kinds: open, opened, ask, reply. Of each: magic, version, kind, zero, number, the bodies' parts, the end.
    for kind in 1..=4 {
        let mut places: Vec<usize> = vec![0, 4, 5, 6, 16, 30, 47, 48, 60];
        if kind == 4 {
            // The second piece's border and inside.
            places.extend([65_536 + 14, 65_536 + 16, 100_000]);
        }
        for place in places {
            for cut in [false, true] {
                let is_anothers_channel = kind == 3 && (16..32).contains(&place) && !cut;
                let damaged = AtomicBool::new(false);
                let port = relay(listener.port(), &Seen::default(), move |mut bytes| {
                    let again = is_anothers_channel && damaged.load(Ordering::Relaxed);
                    if bytes.get(5) == Some(&kind) && !again {
                        damaged.store(true, Ordering::Relaxed);
                        let at = place.min(bytes.len() - 1);
                        if cut {
                            bytes.truncate(at);
                        } else {
                            bytes[at] ^= 4;
                        }
                    }
                    bytes
                });
                let attempt = || net::query(Some(&key(1)), "127.0.0.1", port, None, vec![], LONG);
                if is_anothers_channel {
                    // The listener does not know it, and the client opens another channel.
                    assert_eq!(attempt().unwrap(), ranks(1, &[200_000]));
                    continue;
                }
                // A reply is damaged when its request has passed.
                let result = if kind == 4 { attempt() } else { passed.nothing_of(attempt) };
                let error = result.err().unwrap_or_else(|| panic!("frame {kind}, byte {place}, cut {cut} was taken"));
                let kinds = [ErrorKind::Incompatible, ErrorKind::Corrupt, ErrorKind::VersionMismatch];
                assert!(kinds.contains(&error.kind()), "frame {kind}, byte {place}: {error}");
            }
        }
        good();
    }
    // The good ones, those that were asked anew, and those whose reply was damaged later.
    assert!(passed.count() >= 4 + 2 + 2 * 12);
}

#[test]
fn a_client_with_a_key_takes_nothing_in_clear() {
    // Whoever sits in the listener's place answers with whole ranks, or with frames of the sealed protocol.
    let sealed = |kind: u8, tail: &[u8]| [b"KVFS\x01", [kind, 0, 0].as_slice(), &[0; 8], tail].concat();
    let replies = [
        ranks(1, &[100]).to_bytes().unwrap(),
        HandshakeReply::Pushed { id: 1, missing: 0 }.to_bytes().unwrap(),
        HandshakeReply::Refused { id: 1, code: RefusalCode::NotReady, message: "later".into() }.to_bytes().unwrap(),
        vec![],
        sealed(2, &[1; 64]),
        sealed(4, &ranks(1, &[100]).to_bytes().unwrap()),
        sealed(5, &[]),
    ];
    for (index, reply) in replies.into_iter().enumerate() {
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let address = Address { bind: ip, advertise: ip, note: None };
        let got = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&got);
        let listener = Listener::bind(&ListenerConfig { address, port: 0, pushes: true }, move |request| {
            heard.lock().unwrap().push(request.to_vec());
            let mut reply = reply.clone();
            // As an echo of the exchange's number, which is in clear.
            if reply.starts_with(b"KVFS") {
                reply[8..16].copy_from_slice(&request[8..16]);
            }
            reply
        })
        .unwrap();
        // Longer where a busy machine takes longer to ask.
        for limit in (0..5).map(|doubled| Duration::from_secs(3 << doubled)) {
            let engine = Some(EngineId::new(SECRET).unwrap());
            let result = net::query(Some(&key(1)), "127.0.0.1", listener.port(), engine, vec![], limit);
            assert!(result.is_err(), "reply {index}: {result:?}");
            if !got.lock().unwrap().is_empty() {
                break;
            }
        }
        let heard = got.lock().unwrap();
        assert!(!heard.is_empty() && !heard.iter().any(|bytes| contains(bytes, SECRET.as_bytes())));
    }
}

/// Stands between a client and a listener on the TCP level and keeps what the client sent by its first connection.
fn tap(to: u16) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let front = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = front.local_addr().unwrap().port();
    let sent = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&sent);
    std::thread::spawn(move || {
        for (number, client) in front.incoming().enumerate() {
            let (mut client, keep) = (client.unwrap(), Arc::clone(&keep));
            let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).unwrap();
            let (mut from_server, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from_server, &mut to_client);
            });
            std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                while let Ok(len @ 1..) = client.read(&mut buffer) {
                    if number == 0 {
                        keep.lock().unwrap().extend_from_slice(&buffer[..len]);
                    }
                    if server.write_all(&buffer[..len]).is_err() {
                        break;
                    }
                }
                let _ = server.shutdown(Shutdown::Both);
            });
        }
    });
    (port, sent)
}

/// Sends captured bytes again, ZMQ's greeting included, and gives what comes back: until `last`, and what is there
/// soon after.
fn replay(port: u16, bytes: &[u8], last: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let (mut all, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    // In two parts, as a client would: its greeting, and when the listener has said its own, the rest.
    let (greeting, rest) = bytes.split_at(64);
    stream.write_all(greeting).unwrap();
    while all.len() < 64 {
        let len = stream.read(&mut buffer).unwrap();
        assert_ne!(len, 0, "the listener hung up at the greeting");
        all.extend_from_slice(&buffer[..len]);
    }
    stream.write_all(rest).unwrap();
    while !contains(&all, last) {
        let len = stream.read(&mut buffer).unwrap();
        assert_ne!(len, 0, "the listener hung up: {}", String::from_utf8_lossy(&all));
        all.extend_from_slice(&buffer[..len]);
    }
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    while let Ok(len @ 1..) = stream.read(&mut buffer) {
        all.extend_from_slice(&buffer[..len]);
    }
    all
}

/// How the answer begins that a request's channel is gone.
const AGAIN: &[u8] = b"KVFS\x01\x05";

#[test]
fn a_captured_handshake_is_refused_in_this_life_of_the_listener_and_the_next() {
    let (mut first, passed) = listener(0, Some(key(1)), &[5000]);
    let port = first.port();
    let (tapped, query_bytes) = tap(port);
    assert_eq!(query(Some(&key(1)), tapped).unwrap(), ranks(1, &[5000]));
    let (tapped, push_bytes) = tap(port);
    push(Some(&key(1)), "127.0.0.1", tapped, 1, vec![6; 100_000], LONG).unwrap();
    let captures = [query_bytes.lock().unwrap().clone(), push_bytes.lock().unwrap().clone()];
    assert!(captures[0].len() > 100 && captures[1].len() > 100_000);
    assert!(passed.count() >= 2);
    for capture in &captures {
        let back = passed.nothing_of(|| replay(port, capture, AGAIN));
        assert!(contains(&back, b"came before"), "{}", String::from_utf8_lossy(&back));
        assert!(!contains(&back, SECRET.as_bytes()) && back.len() < 2000, "{} bytes", back.len());
    }
    assert_eq!(query(Some(&key(1)), port).unwrap(), ranks(1, &[5000]));
    first.shutdown();
    let (second, passed) = listener(port, Some(key(1)), &[5000]);
    for capture in &captures {
        // A channel that only the first sender could use, and the word that the request's own is gone.
        let back = passed.nothing_of(|| replay(second.port(), capture, AGAIN));
        assert!(!contains(&back, SECRET.as_bytes()) && back.len() < 2000, "{} bytes", back.len());
    }
    assert_eq!(query(Some(&key(1)), second.port()).unwrap(), ranks(1, &[5000]));
    // The same without a key: what was captured is answered again, with everything.
    let (open, passed) = listener(0, None, &[5000]);
    let (tapped, bytes) = tap(open.port());
    net::query(None, "127.0.0.1", tapped, None, vec![], LONG).unwrap();
    let (capture, before) = (bytes.lock().unwrap().clone(), passed.count());
    let back = replay(open.port(), &capture, &blob(5000, 0)[4900..]);
    assert!(contains(&back, SECRET.as_bytes()) && back.len() > 5000);
    assert!(passed.count() > before);
}

#[test]
fn a_client_asks_again_when_the_listener_is_not_ready_or_forgot_its_channel() {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let address = Address { bind: ip, advertise: ip, note: None };
    let mut auth = AuthLayer::new(Some(key(1)), &address);
    let (mut asked, mut restarted) = (0, false);
    let listener =
        Listener::bind(&ListenerConfig { address: address.clone(), port: 0, pushes: true }, move |request| {
            // The first question.
            if request.get(5) == Some(&3) && !std::mem::replace(&mut restarted, true) {
                // As after a restart between the two round trips.
                auth = AuthLayer::new(Some(key(1)), &address);
            }
            auth.answer(request, |clear| {
                let HandshakeRequest::Query { id, .. } = HandshakeRequest::from_bytes(clear).unwrap() else { panic!() };
                asked += 1;
                let late = HandshakeReply::Refused { id, code: RefusalCode::NotReady, message: "starting".into() };
                (if asked < 3 { late } else { ranks(id, &[10]) }).to_bytes().unwrap()
            })
        })
        .unwrap();
    assert_eq!(query(Some(&key(1)), listener.port()).unwrap(), ranks(1, &[10]));
    // Four channels are opened, and of four questions three reach the engine.
    assert!(listener.requests() >= 8);
}
