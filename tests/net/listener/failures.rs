//! Handshakes that fail, and why.

use super::*;

/// What a client with the default patience is told of the listener at a host and port, and after how long.
fn failure(host: &str, port: u16, limit: Duration) -> (kvferry::Error, Duration) {
    let start = Instant::now();
    let error = query(None, host, port, None, vec![], limit).unwrap_err();
    (error, start.elapsed())
}

fn says(error: &kvferry::Error, kind: ErrorKind, parts: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{part:?} is not in: {error}");
    }
}

/// Six reasons, six texts: what was tried, what was seen, what to do. Those that are certain are told far before the
/// time is up.
#[test]
fn a_handshake_that_fails_tells_why() {
    let (error, took) = failure("no-such-host.invalid", 5680, LONG);
    says(&error, ErrorKind::Unreachable, &["\"no-such-host.invalid\" does not resolve", "remote_host"]);
    assert!(took < LONG / 2, "{took:?}");

    let port = unused_port();
    for host in ["127.0.0.1", "localhost"] {
        let (error, took) = failure(host, port, LONG);
        let at = format!("127.0.0.1:{port}");
        says(&error, ErrorKind::Unreachable, &[&at, host, "refused the connection", "check that the producer"]);
        assert!(took < LONG / 2, "{took:?}");
    }

    let mute = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = mute.local_addr().unwrap().port();
    let (error, _) = failure("127.0.0.1", port, Duration::from_secs(10));
    let at = format!("127.0.0.1:{port}");
    says(&error, ErrorKind::Unreachable, &[&at, "says nothing", "its process is stopped"]);

    // One that answers in another language, and one that waits for a line of it. Each goes on for as long as it is asked.
    for wait_for_line in [false, true] {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = server.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in server.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut got = [0u8; 1];
                    while wait_for_line && got != *b"\n" && stream.read_exact(&mut got).is_ok() {}
                    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
                    let _ = stream.read_to_end(&mut Vec::new());
                });
            }
        });
        let (error, took) = failure("127.0.0.1", port, LONG);
        let at = format!("127.0.0.1:{port}");
        says(&error, ErrorKind::Corrupt, &[&at, "an HTTP server", "400 Bad Request", "remote_port"]);
        assert!(took < LONG / 2, "{took:?}");
    }

    let context = zmq::Context::new();
    let publisher = context.socket(zmq::PUB).unwrap();
    publisher.bind("tcp://127.0.0.1:*").unwrap();
    let port = publisher.get_last_endpoint().unwrap().unwrap().rsplit_once(':').unwrap().1.parse().unwrap();
    let (error, took) = failure("127.0.0.1", port, LONG);
    says(&error, ErrorKind::Corrupt, &[&format!("127.0.0.1:{port}"), "a ZMQ socket of the type PUB", "remote_port"]);
    assert!(took < LONG / 2, "{took:?}");

    let older = Listener::bind(&loopback(0), |b| {
        let mut bytes = reply(&ranks(request(b).id(), "old"));
        let at = bytes.windows(8).position(|w| w == b"\xa7version").unwrap() + 8;
        bytes[at] = 1;
        bytes
    })
    .unwrap();
    let (error, took) = failure("127.0.0.1", older.port(), LONG);
    says(&error, ErrorKind::VersionMismatch, &["version 1", "what listens on"]);
    assert!(took < LONG / 2, "{took:?}");
}

/// A name of several addresses of which others are taken by somebody else: the one that fits is found.
#[test]
fn the_address_of_a_name_that_fits_is_found() {
    let Ok(other) = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) else {
        skipped("the_address_of_a_name_that_fits_is_found: this host has no IPv6");
        return;
    };
    let port = other.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in other.incoming() {
            let _ = stream.unwrap().write_all(b"SSH-2.0-x\r\n");
        }
    });
    let Ok(_listener) = Listener::bind(&loopback(port), |b| reply(&ranks(request(b).id(), "v4"))) else { return };
    assert_eq!(query(None, "localhost", port, None, vec![], LONG), Ok(ranks(1, "v4")));
}

/// A name service that takes its time stops nobody else: other listeners are asked meanwhile.
#[test]
fn names_are_resolved_beside_the_loop() {
    let listener = Listener::bind(&loopback(0), |b| reply(&ranks(request(b).id(), "quick"))).unwrap();
    let mut client = Client::new(ClientLimits::default(), None);
    let begin = Instant::now();
    for id in 1..=20 {
        client.ask(begin, &format!("no-such-host-{id}.invalid"), 5680, all(id), begin + LONG);
    }
    client.ask(begin, "localhost", listener.port(), all(21), begin + LONG);
    client.ask(begin, "127.0.0.1", listener.port(), all(22), begin + LONG);
    let got = answers(&mut client, 22);
    for (id, result) in &got[..20] {
        let error = result.as_ref().unwrap_err();
        says(error, ErrorKind::Unreachable, &[&format!("no-such-host-{id}.invalid"), "does not resolve"]);
    }
    assert_eq!((&got[20].1, &got[21].1), (&Ok(ranks(21, "quick")), &Ok(ranks(22, "quick"))));
}
