//! The UCX layer against real UCX, the sides in two processes: over TCP, and over shared memory and CMA.

use std::time::Instant;

use kvferry::ucx::{Library, Posted, Status};

use crate::common::memory::{hex, mismatch, pattern_bytes};
use crate::common::ucx::child::{MESSAGE, Peer, serve};
use crate::common::ucx::{LIMIT, Side, wait};

const MIB: usize = 1 << 20;

/// CMA for the bytes, TCP for the messages.
const CMA: &str = "cma,tcp";

/// Shared memory, which can watch the peer then: by looking, in this interval, whether its process lives.
const SHM: &str = "posix,cma,tcp;POSIX_ERROR_HANDLING=y;KEEPALIVE_INTERVAL=200ms";

/// Not a test by itself: the body of the peer processes.
#[test]
#[ignore = "started by the other tests"]
fn peer() {
    serve();
}

fn start(tls: &str, len: usize, seed: u64) -> Peer {
    Peer::start("processes::peer", tls, len, seed)
}

/// Reads and writes the peer's memory in pieces of many lengths and checks every byte on both sides. Returns the
/// lanes used.
fn move_bytes(tls: &str) -> String {
    const LEN: usize = 4 * MIB;
    let mut peer = start(tls, LEN, 10);
    let side = Side::new(tls, LEN);
    let endpoint = side.connect(&peer.address);
    let rkey = endpoint.unpack_rkey(&peer.rkey).unwrap();
    // Pieces of growing, odd lengths that cover the memory, many under way at once.
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < LEN {
        let len = (1 + pieces.len() * pieces.len() * 37).min(LEN - start);
        pieces.push((start, len));
        start += len;
    }
    let mut pending = 0;
    for (token, (start, len)) in pieces.iter().enumerate() {
        let posted =
            endpoint.get(&rkey, rkey.base() + *start as u64, &side.memory, *start, *len, token as u64).unwrap();
        pending += usize::from(posted == Posted::Pending);
    }
    for _ in 0..pending {
        side.completion().result.unwrap();
    }
    assert_eq!(mismatch(&side.buffer.read(0..LEN), 10, 0), None);

    side.buffer.fill(11);
    let mut pending = 0;
    for (token, (start, len)) in pieces.iter().enumerate() {
        // Every second piece, so that what lies between must stay as it was.
        if token % 2 == 0 {
            let remote = rkey.base() + *start as u64;
            let posted = endpoint.put(&rkey, remote, &side.memory, *start, *len, token as u64).unwrap();
            pending += usize::from(posted == Posted::Pending);
        }
    }
    pending += usize::from(endpoint.flush(u64::MAX).unwrap() == Posted::Pending);
    for _ in 0..pending {
        side.completion().result.unwrap();
    }
    for (token, (start, len)) in pieces.iter().enumerate() {
        peer.tell(&format!("check {} {start} {len}", if token % 2 == 0 { 11 } else { 10 }));
        assert_eq!(peer.answer_driving(&side), "checked None", "piece {token} of {len} bytes at {start}");
    }
    let lanes = endpoint.describe();
    drop(endpoint);
    peer.quit();
    lanes
}

#[test]
fn bytes_move_over_tcp() {
    let lanes = move_bytes("tcp");
    assert!(lanes.contains("tcp") && !lanes.contains("cma"), "{lanes}");
}

#[test]
fn bytes_move_over_cma() {
    let lanes = move_bytes(CMA);
    // UCX 1.18 has no lane of it for an endpoint that watches its peer.
    let is_older = Library::open(None).unwrap().info().number < (1, 22, 0);
    assert!(lanes.contains("cma") || is_older, "{lanes}");
}

#[test]
fn bytes_move_over_shared_memory() {
    let lanes = move_bytes(SHM);
    assert!(lanes.contains("posix") && !lanes.contains("tcp"), "{lanes}");
}

/// Sends messages of many sizes both ways.
fn move_messages(tls: &str) {
    let mut peer = start(tls, 64, 0);
    let side = Side::new(tls, 64);
    side.worker.accept_messages(MESSAGE, None).unwrap();
    let endpoint = side.connect(&peer.address);
    peer.tell(&format!("connect {}", hex(&side.worker.address().unwrap())));
    assert_eq!(peer.answer_driving(&side), "connected");
    for (seed, len) in [(1u64, 0usize), (2, 1), (3, 1000), (4, 9000), (5, 100_000), (6, 4 * MIB)] {
        let posted = endpoint.send_am(MESSAGE, &seed.to_le_bytes(), pattern_bytes(seed, len), seed).unwrap();
        side.done(posted, seed);
        assert_eq!(peer.answer_driving(&side), format!("message {len} None"));

        peer.tell(&format!("send {seed} {len}"));
        let message = wait("the message", || {
            side.worker.progress();
            side.worker.poll_message()
        });
        assert_eq!((message.id, message.header), (MESSAGE, seed.to_le_bytes().to_vec()));
        assert_eq!(message.data.len(), len);
        assert_eq!(mismatch(&message.data, seed, 0), None);
        assert_eq!(peer.answer_driving(&side), "completion 0 true");
    }
    drop(endpoint);
    peer.quit();
}

#[test]
fn messages_move_over_tcp() {
    move_messages("tcp");
}

#[test]
fn messages_move_over_shared_memory() {
    move_messages(SHM);
}

/// Kills the peer while reads are under way: each must end, and the failure must be told.
fn lose_the_peer(tls: &str) {
    const LEN: usize = 4 * MIB;
    const WINDOW: usize = 64;
    let mut peer = start(tls, LEN, 20);
    let side = Side::new(tls, LEN);
    let endpoint = side.connect(&peer.address);
    let id = endpoint.id();
    let rkey = endpoint.unpack_rkey(&peer.rkey).unwrap();
    let posted = endpoint.get(&rkey, rkey.base(), &side.memory, 0, LEN, 0).unwrap();
    side.done(posted, 0);
    assert_eq!(mismatch(&side.buffer.read(0..LEN), 20, 0), None);
    side.buffer.zero();
    let (mut posted, mut ended, mut failed, mut killed) = (0usize, 0usize, 0usize, false);
    let mut outcome = vec![None; 2000];
    let end = Instant::now() + LIMIT;
    // Reads of 64 KiB each go on until the first fails; the kill comes in their midst.
    while posted < outcome.len() && failed == 0 {
        if posted - ended < WINDOW {
            let offset = (posted * 65536) % LEN;
            match endpoint.get(&rkey, rkey.base() + offset as u64, &side.memory, offset, 65536, posted as u64) {
                Ok(Posted::Done) => {
                    outcome[posted] = Some(true);
                    (posted, ended) = (posted + 1, ended + 1);
                }
                Ok(Posted::Pending) => posted += 1,
                Err(_) => failed += 1,
            }
        }
        side.worker.progress();
        while let Some(completion) = side.worker.poll_completion() {
            let place = &mut outcome[completion.token as usize];
            assert!(place.is_none(), "a token came twice");
            *place = Some(completion.result.is_ok());
            failed += usize::from(completion.result.is_err());
            ended += 1;
        }
        if ended > 300 && !killed {
            killed = true;
            peer.kill();
        }
        assert!(Instant::now() < end, "{posted} posted, {ended} ended");
    }
    assert!(killed);
    // Whatever is still under way ends by itself, and the endpoint is reported.
    let mut report = side.worker.poll_failed_endpoints();
    let (failed_id, status) = wait("the end of every read and the report", || {
        side.worker.progress();
        while let Some(completion) = side.worker.poll_completion() {
            outcome[completion.token as usize] = Some(completion.result.is_ok());
            ended += 1;
        }
        report = report.take().or_else(|| side.worker.poll_failed_endpoints());
        report.filter(|_| ended == posted)
    });
    assert!(outcome[..posted].iter().all(Option::is_some));
    let error = endpoint.get(&rkey, rkey.base(), &side.memory, 0, 10, 1).unwrap_err();
    assert_eq!((failed_id, endpoint.failure()), (id, Some(status)));
    assert_ne!(status, Status::OK);
    assert!(error.detail.contains("has failed; close it and connect again"), "{error}");
    let close = endpoint.close(false);
    wait("the close", || {
        side.worker.progress();
        close.is_finished().then_some(())
    });
    // What was read while the peer lived is right: pieces that ended well and were not read again later.
    for (token, result) in outcome.iter().enumerate().take(posted) {
        let offset = (token * 65536) % LEN;
        let later_failed = (token + 1..posted).any(|t| (t * 65536) % LEN == offset && outcome[t] == Some(false));
        if *result == Some(true) && !later_failed {
            assert_eq!(mismatch(&side.buffer.read(offset..offset + 65536), 20, offset), None, "read {token}");
        }
    }
    // A new peer works with the same worker.
    let peer = start(tls, LEN, 21);
    let endpoint = side.connect(&peer.address);
    let rkey = endpoint.unpack_rkey(&peer.rkey).unwrap();
    let posted = endpoint.get(&rkey, rkey.base(), &side.memory, 0, LEN, 5).unwrap();
    side.done(posted, 5);
    assert_eq!(mismatch(&side.buffer.read(0..LEN), 21, 0), None);
    // The peer goes before the connection is closed, which must not keep the worker from closing.
    peer.quit();
    drop((endpoint, rkey));
    side.worker.close(LIMIT).unwrap();
}

#[test]
fn a_killed_peer_ends_every_read_over_tcp() {
    lose_the_peer("tcp");
}

#[test]
fn a_killed_peer_ends_every_read_over_cma() {
    lose_the_peer(CMA);
}

#[test]
fn a_peer_that_is_gone_fails_the_connection() {
    let mut peer = start("tcp", 64, 0);
    peer.kill();
    let side = Side::new("tcp", 64);
    // UCX may notice at once or in the background.
    let endpoint = match side.worker.connect(&peer.address, "") {
        Ok(endpoint) => endpoint,
        Err(error) => {
            assert_ne!(error.status, Status::OK);
            return;
        }
    };
    let pending = match endpoint.send_am(MESSAGE, b"", vec![1; 100], 1) {
        Ok(posted) => posted == Posted::Pending,
        Err(_) => false,
    };
    let report = wait("the failure", || {
        side.worker.progress();
        side.worker.poll_failed_endpoints()
    });
    assert_eq!(report.0, endpoint.id());
    if pending {
        assert!(side.completion().result.is_err());
    }
}
