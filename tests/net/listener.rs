//! The listener against any bytes, and the client against listeners that are absent, slow, wrong or gone.

mod awaits;
mod failures;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::ports::unused_port;
use crate::common::skip::skipped;
use kvferry::ErrorKind;
use kvferry::net::{
    Address, Awaited, AwaitedPrefill, Client, ClientLimits, Listener, ListenerConfig, RequestHandler, choose,
    local_addresses, push, query,
};
use kvferry::proto::handshake::{Directory, PrefillProgress, Pushes};
use kvferry::proto::ids::{EngineId, Incarnation, RankId, RequestId};
use kvferry::proto::wire::limits::MAX_REQUEST_BYTES;
use kvferry::proto::wire::{Cause, EngineShape, HandshakeReply, HandshakeRequest, Message, Prefill, RefusalCode};

const LONG: Duration = Duration::from_secs(60);

fn at(ip: IpAddr, port: u16) -> ListenerConfig {
    ListenerConfig { address: Address { bind: ip, advertise: ip, note: None }, port, pushes: true }
}

fn loopback(port: u16) -> ListenerConfig {
    at(Ipv4Addr::LOCALHOST.into(), port)
}

/// Answers with the request's own bytes behind a mark.
fn echo(request: &[u8]) -> Vec<u8> {
    [b"echo:".as_slice(), request].concat()
}

fn request(bytes: &[u8]) -> HandshakeRequest {
    HandshakeRequest::from_bytes(bytes).unwrap()
}

fn reply(reply: &HandshakeReply) -> Vec<u8> {
    reply.to_bytes().unwrap()
}

/// An engine without ranks, which is enough to tell replies apart.
fn ranks(id: u64, engine: &str) -> HandshakeReply {
    HandshakeReply::Ranks {
        id,
        engine: EngineId::new(engine).unwrap(),
        incarnation: Incarnation(1),
        shape: EngineShape { tp: 1, pp: 1, dcp: 1 },
        ranks: vec![],
    }
}

fn refused(id: u64, code: RefusalCode) -> HandshakeReply {
    HandshakeReply::Refused { id, code, message: "no".into() }
}

fn receive(socket: &zmq::Socket) -> Vec<Vec<u8>> {
    socket.set_rcvtimeo(60_000).unwrap();
    socket.recv_multipart(0).unwrap()
}

#[test]
fn the_listener_survives_any_bytes() {
    let mut listener = Listener::bind(&loopback(0), |request| {
        assert!(request != b"panic", "the answering function panics on purpose");
        echo(request)
    })
    .unwrap();
    assert_ne!(listener.port(), 0);
    let endpoint = format!("tcp://{}:{}", listener.host(), listener.port());
    let context = zmq::Context::new();
    let dealer = context.socket(zmq::DEALER).unwrap();
    dealer.set_linger(0).unwrap();
    dealer.connect(&endpoint).unwrap();

    // A DEALER without and with the empty delimiter, and a REQ, which adds one by itself.
    dealer.send("plain", 0).unwrap();
    assert_eq!(receive(&dealer), [b"echo:plain".to_vec()]);
    dealer.send_multipart([b"".as_slice(), b"marked"], 0).unwrap();
    assert_eq!(receive(&dealer), [b"".to_vec(), b"echo:marked".to_vec()]);
    let req = context.socket(zmq::REQ).unwrap();
    req.set_linger(0).unwrap();
    req.connect(&endpoint).unwrap();
    req.send("req", 0).unwrap();
    assert_eq!(receive(&req), [b"echo:req".to_vec()]);

    // Other framings count as an empty request, so that the sender hears of it.
    for frames in [vec!["a", "b"], vec!["a", "", "b"], vec!["", "a", "b"], vec!["", "", "", ""], vec!["x"; 500]] {
        let delimited = frames[0].is_empty();
        dealer.send_multipart(&frames, 0).unwrap();
        let got = receive(&dealer);
        assert_eq!(got.last().unwrap(), b"echo:", "{} frames", frames.len());
        assert_eq!(got.len(), 1 + usize::from(delimited));
    }
    dealer.send("", 0).unwrap();
    assert_eq!(receive(&dealer), [b"echo:".to_vec()]);

    // A panic in the answer costs that reply only.
    dealer.send("panic", 0).unwrap();
    dealer.send("after", 0).unwrap();
    assert_eq!(receive(&dealer), [b"echo:after".to_vec()]);

    // What is not ZMQ at all, and a ZMQ greeting cut short.
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 4096], vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3]] {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, listener.port())).unwrap();
        stream.write_all(&bytes).unwrap();
        // The listener may have hung up by now.
        let _ = stream.shutdown(std::net::Shutdown::Write);
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut sink = Vec::new();
        let _ = stream.read_to_end(&mut sink);
    }

    // A frame over the limit costs its sender the connection and nobody else anything.
    let huge = context.socket(zmq::DEALER).unwrap();
    huge.set_linger(0).unwrap();
    huge.connect(&endpoint).unwrap();
    huge.send(vec![7u8; MAX_REQUEST_BYTES + 1], 0).unwrap();
    let before = listener.requests();
    dealer.send("still here", 0).unwrap();
    assert_eq!(receive(&dealer), [b"echo:still here".to_vec()]);
    assert_eq!(listener.requests(), before + 1);

    // One that never reads its replies loses them, the others do not wait for it.
    let deaf = context.socket(zmq::DEALER).unwrap();
    deaf.set_linger(0).unwrap();
    deaf.set_rcvhwm(1).unwrap();
    deaf.connect(&endpoint).unwrap();
    for _ in 0..40 {
        deaf.send(vec![1u8; 1 << 20], 0).unwrap();
    }
    dealer.send("heard", 0).unwrap();
    assert_eq!(receive(&dealer), [b"echo:heard".to_vec()]);

    assert!(listener.is_alive() && listener.failure().is_none());
    listener.shutdown();
    listener.shutdown();
    assert!(!listener.is_alive() && listener.failure().is_none());
    TcpListener::bind((Ipv4Addr::LOCALHOST, listener.port())).unwrap();
}

#[test]
fn a_client_that_asks_four_questions_at_a_time_gets_every_answer() {
    // As many as clients of earlier releases ask.
    const AT_A_TIME: usize = 4;
    let listener = Listener::bind(&loopback(0), |request| {
        // So that a question always waits, and ZMQ is never asked what else there is.
        std::thread::sleep(Duration::from_micros(50));
        echo(request)
    })
    .unwrap();
    let context = zmq::Context::new();
    let socket = context.socket(zmq::DEALER).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_rcvtimeo(20_000).unwrap();
    socket.connect(&format!("tcp://127.0.0.1:{}", listener.port())).unwrap();
    let question = |number: usize| number.to_string().into_bytes();
    for number in 0..5_000 {
        socket.send(question(number), 0).unwrap();
        if let Some(answered) = number.checked_sub(AT_A_TIME - 1) {
            assert_eq!(socket.recv_bytes(0), Ok(echo(&question(answered))));
        }
    }
}

#[test]
fn a_port_in_use_is_an_error_with_a_remedy() {
    let first = Listener::bind(&loopback(0), echo).unwrap();
    let error = Listener::bind(&loopback(first.port()), echo).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddressInUse);
    for part in [&first.port().to_string(), "in use", "another port", "port 0"] {
        assert!(error.message().contains(part), "{error}");
    }
    let foreign = Listener::bind(&at("192.0.2.7".parse().unwrap(), 0), echo).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::InvalidArgument);
    assert!(foreign.message().contains("192.0.2.7 is not an address of this host (127.0.0.1"), "{foreign}");
    let port = first.port();
    drop(first);
    assert_eq!(Listener::bind(&loopback(port), echo).unwrap().port(), port);
}

#[test]
fn ipv6_is_bracketed_all_the_way() {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        skipped("ipv6_is_bracketed_all_the_way: this host has no IPv6");
        return;
    }
    let answer = |bytes: &[u8]| reply(&ranks(request(bytes).id(), "six"));
    let listener = Listener::bind(&at(Ipv6Addr::LOCALHOST.into(), 0), answer).unwrap();
    assert_eq!(listener.host(), "::1");
    for host in ["::1", "[::1]"] {
        let got = query(None, host, listener.port(), None, vec![], LONG).unwrap();
        assert_eq!(got, ranks(1, "six"));
    }
    let any = Listener::bind(&at(Ipv6Addr::UNSPECIFIED.into(), 0), answer).unwrap();
    for host in ["::1", "127.0.0.1"] {
        assert_eq!(query(None, host, any.port(), None, vec![], LONG).unwrap(), ranks(1, "six"));
    }
    let taken = Listener::bind(&at(Ipv6Addr::LOCALHOST.into(), listener.port()), echo).unwrap_err();
    assert!(taken.message().contains(&format!("[::1]:{}", listener.port())), "{taken}");
}

#[test]
fn the_wildcard_is_bound_but_not_advertised() {
    let address = choose(Some("0.0.0.0"), None, false).unwrap();
    assert!(!address.advertise.is_unspecified());
    let found = address.advertise.to_string();
    let is_alone = address.note.as_ref().is_some_and(|note| note.contains("no address that others could reach"));
    let answer = |bytes: &[u8]| reply(&ranks(request(bytes).id(), "wild"));
    let listener = Listener::bind(&ListenerConfig { address, port: 0, pushes: true }, answer).unwrap();
    assert_eq!(listener.host(), found);
    assert!(is_alone || !listener.host().starts_with("127."));
    for host in [found.as_str(), "127.0.0.1"] {
        assert_eq!(query(None, host, listener.port(), None, vec![], LONG).unwrap(), ranks(1, "wild"));
    }
}

#[test]
fn a_listener_that_is_not_ready_is_asked_again() {
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let listener = Listener::bind(&loopback(0), move |bytes| {
        let id = request(bytes).id();
        let n = count.fetch_add(1, Ordering::SeqCst);
        reply(&if n < 4 { refused(id, RefusalCode::NotReady) } else { ranks(id, "late") })
    })
    .unwrap();
    let got = query(None, "127.0.0.1", listener.port(), None, vec![], LONG).unwrap();
    assert_eq!(got, ranks(1, "late"));
    // More where the machine was so slow that the client asked again.
    assert!(asked.load(Ordering::SeqCst) >= 5);

    // One that stays so gives its refusal as the answer when the time is up.
    let never = Listener::bind(&loopback(0), |bytes| reply(&refused(request(bytes).id(), RefusalCode::NotReady)));
    let port = never.as_ref().unwrap().port();
    assert_eq!(
        longer(300, |limit| query(None, "127.0.0.1", port, None, vec![], limit).ok()),
        refused(1, RefusalCode::NotReady)
    );
}

/// What `attempt` gives within a limit, which is doubled where a busy machine takes longer.
fn longer<T>(first_ms: u64, attempt: impl Fn(Duration) -> Option<T>) -> T {
    let limits = (0..).map(|doubled| Duration::from_millis(first_ms << doubled));
    limits.take_while(|limit| *limit < LONG).find_map(attempt).expect("nothing within any limit")
}

#[test]
fn an_unreachable_head_is_named() {
    let port = unused_port();
    let error = query(None, "127.0.0.1", port, None, vec![], Duration::from_millis(300)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    for part in [&format!("127.0.0.1:{port}"), "check that the producer engine runs"] {
        assert!(error.message().contains(part), "{error}");
    }
    // One that accepts and says nothing: not ZMQ.
    let mute = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = mute.local_addr().unwrap().port();
    let error = query(None, "127.0.0.1", port, None, vec![], Duration::from_millis(300)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    // One that takes the request and answers nothing.
    let context = zmq::Context::new();
    let router = context.socket(zmq::ROUTER).unwrap();
    router.bind("tcp://127.0.0.1:*").unwrap();
    let port = router.get_last_endpoint().unwrap().unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    let silent = longer(1500, |limit| {
        let error = query(None, "127.0.0.1", port, None, vec![], limit).unwrap_err();
        (error.kind() == ErrorKind::Timeout).then_some(error)
    });
    assert!(silent.message().contains("answered none"), "{silent}");
    for (host, port) in [("no host", 1u16), ("127.0.0.1", 0), ("", 7)] {
        let error = query(None, host, port, None, vec![], LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
}

#[test]
fn a_head_that_comes_late_is_found() {
    let port = unused_port();
    let pushing = std::thread::spawn(move || push(None, "127.0.0.1", port, 2, b"good".to_vec(), LONG));
    // Longer than who wants to know at once would ask again.
    std::thread::sleep(2 * ClientLimits::default().grace);
    let pushed = |b: &[u8]| reply(&HandshakeReply::Pushed { id: request(b).id(), missing: 1 });
    let _listener = Listener::bind(&loopback(port), pushed).unwrap();
    assert_eq!(pushing.join().unwrap(), Ok(1));
}

#[test]
fn pushes_and_their_refusals() {
    let listener = Listener::bind(&loopback(0), |bytes| match request(bytes) {
        HandshakeRequest::Push { id, expected, metadata } if metadata.as_slice() == b"good" => {
            reply(&HandshakeReply::Pushed { id, missing: expected - 1 })
        }
        other => reply(&refused(other.id(), RefusalCode::Push)),
    })
    .unwrap();
    assert_eq!(push(None, "127.0.0.1", listener.port(), 4, b"good".to_vec(), LONG), Ok(3));
    let error = push(None, "127.0.0.1", listener.port(), 4, b"bad".to_vec(), LONG).unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::InvalidArgument, "no"));
}

/// Runs the client's loop until `n` answers are there.
fn answers(client: &mut Client, n: usize) -> Vec<(u64, kvferry::Result<HandshakeReply>)> {
    let start = Instant::now();
    let mut got = Vec::new();
    while got.len() < n {
        assert!(start.elapsed() < LONG, "{} of {n} answers", got.len());
        client.turn(Instant::now());
        while let Some(a) = client.poll_answer() {
            got.push((a.id, a.result));
        }
        let wait = client.next_deadline().map_or(1000, |d| d.saturating_duration_since(Instant::now()).as_millis() + 1);
        let mut items = Vec::new();
        client.poll_items(&mut items);
        zmq::poll(&mut items, wait.min(1000) as i64).unwrap();
    }
    got.sort_by_key(|(id, _)| *id);
    got
}

fn all(id: u64) -> HandshakeRequest {
    HandshakeRequest::Query { id, engine: None, ranks: vec![RankId { pp: 0, tp: 0 }] }
}

#[test]
fn an_id_that_tells_no_question_from_another_is_refused() {
    let mute = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = mute.local_addr().unwrap().port();
    let (mut client, now) = (Client::new(ClientLimits::default(), None), Instant::now());
    client.ask(now, "127.0.0.1", port, all(7), now + LONG);
    for id in [0, 7] {
        client.ask(now, "127.0.0.1", port, all(id), now + LONG);
        let answer = client.poll_answer().unwrap();
        assert_eq!((answer.id, answer.result.unwrap_err().kind()), (id, ErrorKind::InvalidArgument));
    }
    assert!(client.poll_answer().is_none());
}

#[test]
fn one_client_asks_many_over_one_socket_each() {
    let quick = Listener::bind(&loopback(0), |b| reply(&ranks(request(b).id(), "quick"))).unwrap();
    let other = Listener::bind(&loopback(0), |b| reply(&ranks(request(b).id(), "other"))).unwrap();
    let mistakes = |id| if id == 200 { 1200 } else { id };
    let stray = Listener::bind(&loopback(0), move |b| reply(&ranks(mistakes(request(b).id()), "stray"))).unwrap();
    let newer = Listener::bind(&loopback(0), |_| reply(&refused(0, RefusalCode::Version))).unwrap();
    let garbage = Listener::bind(&loopback(0), |_| vec![0x7e; 3]).unwrap();
    let limits = ClientLimits { idle: Duration::from_millis(50), ..ClientLimits::default() };
    let mut client = Client::new(limits, None);
    assert_eq!(client.next_deadline(), None);
    let now = Instant::now();
    for token in 1..=100u64 {
        let port = if token % 2 == 0 { quick.port() } else { other.port() };
        client.ask(now, "127.0.0.1", port, all(token), now + LONG);
    }
    assert_eq!(client.connections(), 2);
    for (token, result) in answers(&mut client, 100) {
        let HandshakeReply::Ranks { engine, .. } = result.unwrap() else { panic!("not ranks") };
        assert_eq!(engine.as_str(), if token % 2 == 0 { "quick" } else { "other" });
    }
    // One that names no request answers the oldest; garbage is said to be.
    let now = Instant::now();
    client.ask(now, "127.0.0.1", newer.port(), all(201), now + LONG);
    client.ask(now, "127.0.0.1", garbage.port(), all(202), now + LONG);
    let got = answers(&mut client, 2);
    assert_eq!(got[0].1, Ok(refused(0, RefusalCode::Version)));
    assert!(got[1].1.as_ref().is_err_and(|e| e.kind() == ErrorKind::Corrupt), "{got:?}");
    // A reply to nobody's question is no answer: it has come when that to the next question has.
    let now = Instant::now();
    client.ask(now, "127.0.0.1", stray.port(), all(200), now + LONG);
    client.ask(now, "127.0.0.1", stray.port(), all(203), now + 2 * LONG);
    assert_eq!(answers(&mut client, 1)[0].0, 203);
    client.turn(now + LONG);
    let unanswered = client.poll_answer().unwrap();
    assert_eq!((unanswered.id, unanswered.result.unwrap_err().kind()), (200, ErrorKind::Timeout));
    // Idle connections are closed.
    let start = Instant::now();
    while client.connections() > 0 {
        assert!(start.elapsed() < LONG);
        client.turn(Instant::now() + LONG);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(client.next_deadline(), None);
}

#[test]
fn an_answer_that_came_before_the_deadline_counts_however_late_it_is_read() {
    let (may_answer, wait) = std::sync::mpsc::channel::<()>();
    let listener = Listener::bind(&loopback(0), move |bytes| {
        let _ = wait.recv();
        reply(&ranks(request(bytes).id(), "e"))
    })
    .unwrap();
    // Gone before the listener, which else waits for it.
    let may_answer = may_answer;
    let mut client = Client::new(ClientLimits::default(), None);
    let begin = Instant::now();
    client.ask(begin, "127.0.0.1", listener.port(), all(1), begin + LONG);
    while listener.requests() == 0 {
        assert!(begin.elapsed() < LONG);
        client.turn(Instant::now());
    }
    may_answer.send(()).unwrap();
    let mut items = Vec::new();
    client.poll_items(&mut items);
    // The last is the connection: before it are probes of a listener that has said nothing for a while.
    items.drain(..items.len() - 1);
    zmq::poll(&mut items, 60_000).unwrap();
    drop(items);
    // As after a pause of the whole process.
    client.turn(begin + 2 * LONG);
    let answer = client.poll_answer().unwrap();
    assert!(matches!(answer.result, Ok(HandshakeReply::Ranks { id: 1, .. })), "{:?}", answer.result);
}

#[test]
fn a_lost_request_is_sent_again_on_a_new_connection() {
    // The first head takes the request and dies with it; the second, on the same port, answers.
    let context = zmq::Context::new();
    let router = context.socket(zmq::ROUTER).unwrap();
    router.set_linger(0).unwrap();
    router.bind("tcp://127.0.0.1:*").unwrap();
    let port: u16 = router.get_last_endpoint().unwrap().unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    let limits = ClientLimits { resend: Duration::from_millis(100), ..ClientLimits::default() };
    let mut client = Client::new(limits, None);
    let now = Instant::now();
    client.ask(now, "127.0.0.1", port, all(1), now + LONG);
    let mut taken = false;
    while !taken {
        assert!(now.elapsed() < LONG);
        client.turn(Instant::now());
        taken = router.poll(zmq::POLLIN, 10).unwrap() == 1;
    }
    router.recv_multipart(0).unwrap();
    drop(router);
    drop(context);
    let _second = Listener::bind(&loopback(port), |b| reply(&ranks(request(b).id(), "second"))).unwrap();
    assert_eq!(answers(&mut client, 1)[0].1, Ok(ranks(1, "second")));
}

#[test]
fn a_new_connection_reaches_the_listener_that_took_over() {
    let first = Listener::bind(&loopback(0), |b| reply(&ranks(request(b).id(), "first"))).unwrap();
    // What keeps the connections that it has, and then leaves the port to the second.
    let front = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = front.local_addr().unwrap().port();
    let to = first.port();
    let ended = Arc::new(AtomicBool::new(false));
    let end = Arc::clone(&ended);
    let forwards = std::thread::spawn(move || {
        for stream in front.incoming().map(|stream| stream.unwrap()).take_while(|_| !end.load(Ordering::Acquire)) {
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).unwrap();
            for (from, to) in [(&stream, &server), (&server, &stream)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        }
    });
    let mut client = Client::new(ClientLimits::default(), None);
    let ask = |client: &mut Client, id| {
        client.ask(Instant::now(), "127.0.0.1", port, all(id), Instant::now() + LONG);
        answers(client, 1)[0].1.clone()
    };
    assert_eq!(ask(&mut client, 1), Ok(ranks(1, "first")));
    ended.store(true, Ordering::Release);
    drop(TcpStream::connect((Ipv4Addr::LOCALHOST, port)));
    forwards.join().unwrap();
    let _second = Listener::bind(&loopback(port), |b| reply(&ranks(request(b).id(), "second"))).unwrap();
    assert_eq!(ask(&mut client, 2), Ok(ranks(2, "first")));
    client.reconnect(Instant::now(), "127.0.0.1", port);
    assert_eq!(ask(&mut client, 3), Ok(ranks(3, "second")));
}

/// Loses the question of id 1 until it has answered three others, at once.
struct Loses {
    answered: u32,
}

impl RequestHandler for Loses {
    fn answer(&mut self, _: &[u8], bytes: &[u8]) -> Option<Vec<u8>> {
        let id = request(bytes).id();
        self.answered += u32::from(id != 1);
        (id != 1 || self.answered >= 3).then(|| reply(&ranks(id, "e")))
    }
}

#[test]
fn a_lost_answer_is_asked_for_again_while_others_come() {
    let listener = Listener::bind_handler(&loopback(0), Loses { answered: 0 }).unwrap();
    let limits = ClientLimits { resend: Duration::from_millis(200), ..ClientLimits::default() };
    let mut client = Client::new(limits, None);
    let begin = Instant::now();
    let ask = |client: &mut Client, id| {
        client.ask(Instant::now(), "127.0.0.1", listener.port(), all(id), begin + 2 * LONG);
    };
    ask(&mut client, 1);
    ask(&mut client, 2);
    let mut last = 2;
    while begin.elapsed() < LONG {
        client.turn(Instant::now());
        while let Some(answer) = client.poll_answer() {
            assert!(answer.result.is_ok(), "{:?}", answer.result);
            if answer.id == 1 {
                return;
            }
            last += 1;
            ask(&mut client, last);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("not asked again, with {last} answers in between");
}

#[test]
fn connections_are_bounded() {
    let mut client = Client::new(ClientLimits { connections: 2, ..ClientLimits::default() }, None);
    let now = Instant::now();
    for (token, port) in [(1u64, 1u16), (2, 2), (3, 3)] {
        client.ask(now, "127.0.0.1", port, all(token), now + Duration::from_millis(50));
    }
    let got = answers(&mut client, 3);
    assert!(got[2].1.as_ref().is_err_and(|e| e.kind() == ErrorKind::Exhausted), "{got:?}");
    assert!(got[..2].iter().all(|(_, r)| r.as_ref().is_err_and(|e| e.kind() == ErrorKind::Unreachable)), "{got:?}");
}

/// Whoever writes another name or address of the host into a request's `remote_host` gets there too.
#[test]
fn every_address_of_the_host_reaches_the_listener() {
    let address = choose(None, None, false).unwrap();
    let advertised = address.advertise.to_string();
    let answer = |bytes: &[u8]| reply(&ranks(request(bytes).id(), "all"));
    let listener = Listener::bind(&ListenerConfig { address, port: 0, pushes: true }, answer).unwrap();
    assert_eq!(listener.host(), advertised);
    let mut hosts = vec!["127.0.0.1".to_owned(), "localhost".to_owned(), "127.0.0.2".to_owned()];
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
        hosts.extend(["::1".to_owned(), "[::1]".to_owned()]);
    }
    // A link-local address needs its interface beside it, which is not listed here.
    let listed = local_addresses().unwrap().into_iter().map(|a| a.ip);
    hosts.extend(listed.filter(|ip| !ip.to_string().starts_with("fe80")).map(|ip| ip.to_string()));
    for host in hosts {
        let got = query(None, &host, listener.port(), None, vec![], LONG);
        assert_eq!(got, Ok(ranks(1, "all")), "by {host}, advertised is {advertised}");
    }
}
