//! Prefills that are awaited.

use super::*;

/// A directory at a listener.
struct Reception(Arc<Mutex<Directory>>);

impl RequestHandler for Reception {
    fn answer(&mut self, client: &[u8], request: &[u8]) -> Option<Vec<u8>> {
        self.0.lock().unwrap().answer_to(client, request)
    }

    fn poll_reply(&mut self) -> Option<(Vec<u8>, Vec<u8>)> {
        self.0.lock().unwrap().poll_answer()
    }
}

/// What comes next of what a client awaits, within `limit`.
fn next_prefill(client: &mut Client, limit: Duration) -> Option<Awaited> {
    let end = Instant::now() + limit;
    loop {
        client.turn(Instant::now());
        if let Some(awaited) = client.poll_prefill() {
            return Some(awaited);
        }
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn prefills_are_told_when_they_are_over() {
    let name = |name: &str| RequestId::new(name).unwrap();
    let when_over = |request: &str| AwaitedPrefill { request: name(request), from_tokens: 0 };
    let engine = || EngineId::new("p").unwrap();
    let shape = EngineShape { tp: 1, pp: 1, dcp: 1 };
    let directory = Directory::new(engine(), Incarnation(5), shape, Pushes::Refused).unwrap();
    let directory = Arc::new(Mutex::new(directory));
    let mut listener = Listener::bind_handler(&loopback(0), Reception(directory.clone())).unwrap();
    let (host, port) = (listener.host().to_owned(), listener.port());
    let mut clients = [(); 2].map(|()| Client::new(ClientLimits::default(), None));
    for client in &mut clients {
        for (number, request) in (1u64..).zip(["a", "b", "c"]) {
            client.await_prefill(Instant::now(), number, &host, port, engine(), when_over(request), LONG);
        }
        // Longer than a question stays open: it is asked anew, and nothing comes of it.
        assert_eq!(next_prefill(client, Duration::from_millis(2_500)), None);
    }
    let over = Prefill { request: name("b"), blocks: vec![vec![7, 8].into()], tokens: 8, lease_ms: 9, lease_id: 3 };
    directory.lock().unwrap().prefilled(over.clone());
    directory.lock().unwrap().prefill_gone(name("a"));
    listener.wake();
    for client in &mut clients {
        let mut told = [(); 2].map(|()| next_prefill(client, LONG).expect("two are over"));
        told.sort_by_key(|awaited| awaited.number);
        assert_eq!(
            told[1].result,
            Ok(PrefillProgress { incarnation: Incarnation(5), prefill: over.clone(), over: true })
        );
        assert_eq!(told[0].result.as_ref().unwrap_err().0, Cause::LeaseExpired);
    }
    // Queries go their own way meanwhile, and what is no more awaited is not told.
    let client = &mut clients[0];
    let query = HandshakeRequest::Query { id: 7, engine: Some(EngineId::new("q").unwrap()), ranks: vec![] };
    client.ask(Instant::now(), &host, port, query, Instant::now() + LONG);
    let answer = loop {
        client.turn(Instant::now());
        if let Some(answer) = client.poll_answer() {
            break answer;
        }
    };
    assert!(matches!(answer.result, Ok(HandshakeReply::Refused { code: RefusalCode::WrongEngine, .. })));
    client.forget_prefill(3);
    directory.lock().unwrap().prefill_gone(name("c"));
    listener.wake();
    assert_eq!(next_prefill(&mut clients[1], LONG).expect("the other still wants it").number, 3);
    assert_eq!(next_prefill(&mut clients[0], Duration::from_millis(50)), None);
    // A listener that is gone.
    clients[0].await_prefill(Instant::now(), 9, &host, port, engine(), when_over("d"), Duration::from_secs(4));
    listener.shutdown();
    let (cause, text) = next_prefill(&mut clients[0], LONG).expect("an end").result.unwrap_err();
    assert_eq!(cause, Cause::HandshakeFailed);
    assert!(text.contains(&format!("{host}:{port}")), "{text}");
}

/// A question about a prefill stays open for seconds. One that comes when the listener has gone must not wait for that.
#[test]
fn a_listener_that_is_gone_is_told_at_once_beside_an_open_question() {
    let engine = || EngineId::new("p").unwrap();
    let shape = EngineShape { tp: 1, pp: 1, dcp: 1 };
    let directory = Directory::new(engine(), Incarnation(5), shape, Pushes::Refused).unwrap();
    let mut listener = Listener::bind_handler(&loopback(0), Reception(Arc::new(Mutex::new(directory)))).unwrap();
    let (host, port) = (listener.host().to_owned(), listener.port());
    // Nothing else finds out within the time of this test.
    let mut client = Client::new(ClientLimits { resend: 10 * LONG, ..ClientLimits::default() }, None);
    let query = |id| HandshakeRequest::Query { id, engine: Some(EngineId::new("q").unwrap()), ranks: vec![] };
    client.ask(Instant::now(), &host, port, query(1), Instant::now() + LONG);
    assert!(answers(&mut client, 1)[0].1.is_ok(), "the listener is there, and has been heard");
    let name = RequestId::new("a").unwrap();
    client.await_prefill(
        Instant::now(),
        1,
        &host,
        port,
        engine(),
        AwaitedPrefill { request: name, from_tokens: 0 },
        10 * LONG,
    );
    assert_eq!(next_prefill(&mut client, Duration::from_millis(300)), None);
    listener.shutdown();
    let asked = Instant::now();
    client.ask(asked, &host, port, query(2), asked + LONG);
    let error = answers(&mut client, 1).remove(0).1.unwrap_err();
    assert!(error.message().contains("refused the connection"), "{error}");
    assert!(asked.elapsed() < LONG / 2, "{:?}", asked.elapsed());
}

#[test]
fn prefills_under_way_are_told_to_who_wants_to_know() {
    let name = || RequestId::new("a").unwrap();
    let engine = || EngineId::new("p").unwrap();
    let shape = EngineShape { tp: 1, pp: 1, dcp: 1 };
    let directory = Directory::new(engine(), Incarnation(5), shape, Pushes::Refused).unwrap();
    let directory = Arc::new(Mutex::new(directory));
    let mut listener = Listener::bind_handler(&loopback(0), Reception(directory.clone())).unwrap();
    let (host, port) = (listener.host().to_owned(), listener.port());
    let prefill = |tokens: u64| Prefill {
        request: name(),
        blocks: vec![(0..tokens as u32).collect::<Vec<_>>().into()],
        tokens,
        lease_ms: 9,
        lease_id: 3,
    };
    let tell = |tokens: u64| {
        directory.lock().unwrap().prefill_progressed(prefill(tokens));
        listener.wake();
    };
    let mut clients = [(); 2].map(|()| Client::new(ClientLimits::default(), None));
    let ask = |client: &mut Client, from_tokens: u64| {
        let awaited = AwaitedPrefill { request: name(), from_tokens };
        client.await_prefill(Instant::now(), 1, &host, port, engine(), awaited, LONG);
    };
    let news = |tokens: u64, over: bool| {
        let prefill = prefill(tokens);
        Some(Awaited { number: 1, result: Ok(PrefillProgress { incarnation: Incarnation(5), prefill, over }) })
    };
    assert!(!directory.lock().unwrap().is_followed(&name()));
    ask(&mut clients[0], 4);
    ask(&mut clients[1], 0);
    let begin = Instant::now();
    while !directory.lock().unwrap().is_followed(&name()) {
        assert!(begin.elapsed() < LONG);
        for client in &mut clients {
            assert_eq!(next_prefill(client, Duration::from_millis(50)), None);
        }
    }
    tell(3);
    assert_eq!(next_prefill(&mut clients[0], Duration::from_millis(50)), None, "not far enough");
    tell(5);
    assert_eq!(next_prefill(&mut clients[0], LONG), news(5, false));
    // What was told once is not told again; what is known already is told at once.
    ask(&mut clients[0], 6);
    assert_eq!(next_prefill(&mut clients[0], Duration::from_millis(50)), None);
    tell(9);
    assert_eq!(next_prefill(&mut clients[0], LONG), news(9, false));
    ask(&mut clients[0], 8);
    assert_eq!(next_prefill(&mut clients[0], LONG), news(9, false));
    // Blocks that were given away are not told of.
    ask(&mut clients[0], 8);
    assert_eq!(next_prefill(&mut clients[0], LONG), news(9, false));
    directory.lock().unwrap().prefill_retracted(&name());
    ask(&mut clients[0], 8);
    assert_eq!(next_prefill(&mut clients[0], Duration::from_millis(50)), None);
    directory.lock().unwrap().prefilled(prefill(12));
    listener.wake();
    for client in &mut clients {
        assert_eq!(next_prefill(client, LONG), news(12, true));
    }
    assert!(!directory.lock().unwrap().is_followed(&name()));
    listener.shutdown();
}
