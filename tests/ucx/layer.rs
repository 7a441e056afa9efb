//! The UCX layer against real UCX, both sides in this process, driven on one thread: so what is under way stays
//! under way as long as a test wants.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvferry::ucx::{
    Armed, Context, ContextConfig, Library, MAX_PARTS, MemoryKind, MessagePart, Posted, Status, Worker, WorkerOptions,
    rkey_range,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::common::alone::alone;
use crate::common::memory::{Buffer, mismatch, pattern_bytes, pattern_part};
use crate::common::ucx::{LIMIT, Side, context, wait};

const TCP: &str = "tcp";
const MIB: usize = 1 << 20;

/// Drives both sides until `done` gives something.
fn drive<T>(what: &str, a: &Side, b: &Side, mut done: impl FnMut() -> Option<T>) -> T {
    wait(what, || {
        a.worker.progress();
        b.worker.progress();
        done()
    })
}

#[test]
fn get_and_put_move_every_byte() {
    let (near, far) = (Side::new(TCP, 3 * MIB), Side::new(TCP, 2 * MIB));
    far.buffer.fill(1);
    let endpoint = near.connect(&far.worker.address().unwrap());
    let exported = far.memory.pack_rkey().unwrap();
    assert_eq!(rkey_range(&exported).unwrap(), (far.buffer.addr(), far.buffer.len() as u64, MemoryKind::Host));
    let rkey = endpoint.unpack_rkey(&exported).unwrap();
    assert_eq!(rkey.base(), far.buffer.addr());
    // (remote offset, local offset, length): tiny, unaligned, large, and the ends of both ranges.
    let pieces = [(0, 0, 1), (3, 77, 1000), (5000, 10_000, 8192), (MIB + 1, 20_001, MIB - 1), (0, MIB + 50_000, MIB)];
    for (token, (remote, local, len)) in pieces.into_iter().enumerate() {
        let posted = endpoint.get(&rkey, rkey.base() + remote as u64, &near.memory, local, len, token as u64).unwrap();
        if posted == Posted::Pending {
            let completion = drive("the get", &near, &far, || near.worker.poll_completion());
            assert_eq!((completion.token, completion.endpoint), (token as u64, endpoint.id()));
            completion.result.unwrap();
        }
    }
    let mut expected = vec![0u8; near.buffer.len()];
    for (remote, local, len) in pieces {
        expected[local..local + len].copy_from_slice(&pattern_part(1, remote..remote + len));
    }
    assert!(near.buffer.read(0..expected.len()) == expected, "a get wrote a wrong byte or beside its range");

    near.buffer.fill(2);
    let posted = endpoint.put(&rkey, rkey.base() + 100, &near.memory, 200, MIB, 7).unwrap();
    let flush = endpoint.flush(8).unwrap();
    let mut left = [(posted, 7), (flush, 8)].into_iter().filter(|(p, _)| *p == Posted::Pending).count();
    drive("put and flush", &near, &far, || {
        while let Some(completion) = near.worker.poll_completion() {
            completion.result.unwrap();
            left -= 1;
        }
        (left == 0).then_some(())
    });
    let mut expected = pattern_bytes(1, far.buffer.len());
    expected[100..100 + MIB].copy_from_slice(&pattern_part(2, 200..200 + MIB));
    assert!(far.buffer.read(0..expected.len()) == expected, "the put wrote a wrong byte or beside its range");
    assert_eq!(near.worker.in_flight(), 0);
    assert!(endpoint.describe().contains("tcp"), "{}", endpoint.describe());
}

#[test]
fn ranges_outside_the_memory_are_refused() {
    let (near, far) = (Side::new(TCP, 1000), Side::new(TCP, 500));
    let endpoint = near.connect(&far.worker.address().unwrap());
    let rkey = endpoint.unpack_rkey(&far.memory.pack_rkey().unwrap()).unwrap();
    let base = rkey.base();
    let cases = [
        (base, 0, 501),        // longer than the remote memory
        (base + 500, 0, 1),    // behind it
        (base - 1, 0, 10),     // before it
        (base + 400, 0, 101),  // over its end
        (base, 999, 2),        // over the local end
        (base, 1001, 0),       // behind the local end
        (base, usize::MAX, 2), // wrapping
        (u64::MAX, 0, 2),      // wrapping
        (base, 0, usize::MAX), // everything
    ];
    for (remote, local, len) in cases {
        let get = endpoint.get(&rkey, remote, &near.memory, local, len, 1).unwrap_err();
        let put = endpoint.put(&rkey, remote, &near.memory, local, len, 1).unwrap_err();
        assert_eq!((get.status, put.status), (Status::OUT_OF_RANGE, Status::OUT_OF_RANGE), "{get}");
        assert!(get.detail.contains("leave"), "{get}");
    }
    assert_eq!(endpoint.get(&rkey, base + 500, &near.memory, 1000, 0, 1).unwrap(), Posted::Done);
    assert_eq!(near.worker.in_flight(), 0);
}

#[test]
fn what_belongs_elsewhere_is_refused() {
    let (near, far, other) = (Side::new(TCP, 100), Side::new(TCP, 100), Side::new(TCP, 100));
    let address = far.worker.address().unwrap();
    let (one, two) = (near.connect(&address), near.connect(&address));
    let rkey = one.unpack_rkey(&far.memory.pack_rkey().unwrap()).unwrap();
    let error = two.get(&rkey, rkey.base(), &near.memory, 0, 10, 1).unwrap_err();
    assert_eq!(error.status, Status::INVALID_PARAM);
    assert!(error.detail.contains("endpoint 1") && error.detail.contains("endpoint 2"), "{error}");
    let error = one.get(&rkey, rkey.base(), &other.memory, 0, 10, 1).unwrap_err();
    assert_eq!(error.status, Status::INVALID_PARAM);
    assert!(error.detail.contains("another context"), "{error}");
}

#[test]
fn damaged_addresses_and_rkeys_do_not_reach_ucx() {
    let (near, far) = (Side::new(TCP, 100), Side::new(TCP, 100));
    let address = far.worker.address().unwrap();
    let endpoint = near.connect(&address);
    let rkey = far.memory.pack_rkey().unwrap();
    let connect = |bytes: &[u8]| near.worker.connect(bytes, "").unwrap_err();
    let unpack = |bytes: &[u8]| endpoint.unpack_rkey(bytes).unwrap_err();
    for garbage in [&b""[..], b"x", &[0xff; 300], &[0; 64]] {
        assert_eq!(connect(garbage).status, Status::MALFORMED);
        assert_eq!(unpack(garbage).status, Status::MALFORMED);
    }
    for place in 0..address.len() {
        let mut damaged = address.clone();
        damaged[place] ^= 0x55;
        assert_eq!(connect(&damaged).status, Status::MALFORMED, "byte {place}");
        assert_eq!(connect(&address[..place]).status, Status::MALFORMED, "cut at {place}");
    }
    for place in 0..rkey.len() {
        let mut damaged = rkey.clone();
        damaged[place] ^= 0x55;
        assert_eq!(unpack(&damaged).status, Status::MALFORMED, "byte {place}");
        assert_eq!(unpack(&rkey[..place]).status, Status::MALFORMED, "cut at {place}");
    }
    let swapped = connect(&rkey);
    assert!(swapped.detail.contains("they are an rkey"), "{swapped}");
    assert!(unpack(&address).detail.contains("they are a worker address"));
}

#[test]
fn messages_of_all_sizes_arrive_whole() {
    let (near, far) = (Side::new(TCP, 100), Side::new(TCP, 100));
    for id in [0, 7, u16::MAX] {
        far.worker.accept_messages(id, None).unwrap();
        far.worker.accept_messages(id, None).unwrap();
    }
    near.worker.accept_messages(3, None).unwrap();
    let there = near.connect(&far.worker.address().unwrap());
    let back = far.connect(&near.worker.address().unwrap());
    for (number, (id, header_len, len)) in
        [(0, 0, 0), (7, 16, 0), (7, 0, 10), (u16::MAX, 100, 5000), (7, 8, 100_000), (0, 200, 4 * MIB)]
            .into_iter()
            .enumerate()
    {
        let number = number as u64;
        let (header, data) = (pattern_bytes(number, header_len), pattern_bytes(number + 100, len));
        let mut sent = there.send_am(id, &header, data.clone(), number).unwrap() == Posted::Done;
        let mut got = None;
        drive("the message", &near, &far, || {
            if let Some(completion) = near.worker.poll_completion() {
                assert_eq!(completion.token, number);
                completion.result.unwrap();
                sent = true;
            }
            got = got.take().or_else(|| far.worker.poll_message());
            (sent && got.is_some()).then_some(())
        });
        let message = got.unwrap();
        assert_eq!((message.id, &message.header), (id, &header));
        assert_eq!(message.data.len(), len);
        assert_eq!(mismatch(&message.data, number + 100, 0), None);
        // And back.
        back.send_am(3, &message.header, message.data, number).unwrap();
        let message = drive("the answer", &near, &far, || near.worker.poll_message());
        assert_eq!((message.id, &message.header), (3, &header));
        assert!(message.data == data);
    }
    drive("the end of the answers", &near, &far, || (far.worker.in_flight() == 0).then_some(()));
    assert_eq!((near.worker.dropped_messages(), far.worker.dropped_messages()), (0, 0));
    let error = there.send_am(7, &vec![0; near.worker.max_header() + 1], Vec::new(), 1).unwrap_err();
    assert_eq!(error.status, Status::EXCEEDS_LIMIT);
}

#[test]
fn a_message_of_parts_is_sent_from_registered_memory() {
    let tls = "tcp;TCP_MAX_IOV=18";
    let (near, far, other) = (Side::new(tls, MIB), Side::new(TCP, 100), Side::new(TCP, 100));
    far.worker.accept_messages(5, None).unwrap();
    let there = near.connect(&far.worker.address().unwrap());
    let part = |offset, len| MessagePart { memory: Arc::clone(&near.memory), offset, len };
    near.buffer.fill(77);
    let bytes = near.buffer.read(0..MIB);
    for (number, places) in [
        vec![(7, 0)],
        vec![(0, MIB)],
        vec![(100, 3), (0, 0), (50_000, 20_000)],
        (0..MAX_PARTS).map(|i| ((MAX_PARTS - 1 - i) * 65_536, 65_536 - i)).collect(),
    ]
    .into_iter()
    .enumerate()
    {
        let expected: Vec<u8> = places.iter().flat_map(|&(at, len)| &bytes[at..at + len]).copied().collect();
        let parts: Vec<MessagePart> = places.iter().map(|&(at, len)| part(at, len)).collect();
        let mut sent = there.send_am_parts(5, b"head", &parts, number as u64).unwrap() == Posted::Done;
        let mut got = None;
        drive("the message", &near, &far, || {
            sent |= near.worker.poll_completion().is_some_and(|completion| completion.result.is_ok());
            got = got.take().or_else(|| far.worker.poll_message());
            (sent && got.is_some()).then_some(())
        });
        let message = got.unwrap();
        assert_eq!(message.header, b"head");
        assert!(message.data == expected, "message {number} of {} parts differs", parts.len());
    }
    let refused = |parts: &[MessagePart]| there.send_am_parts(5, b"", parts, 9).unwrap_err().status;
    assert_eq!(refused(&[]), Status::INVALID_PARAM);
    assert_eq!(refused(&vec![part(0, 1); MAX_PARTS + 1]), Status::INVALID_PARAM);
    assert_eq!(refused(&[part(0, 1), part(MIB - 1, 2)]), Status::OUT_OF_RANGE);
    assert_eq!(refused(&[part(usize::MAX, 2)]), Status::OUT_OF_RANGE);
    let foreign = MessagePart { memory: Arc::clone(&other.memory), offset: 0, len: 1 };
    assert_eq!(refused(&[foreign]), Status::INVALID_PARAM);
}

#[test]
fn messages_over_the_limit_are_dropped_and_counted() {
    // Above this threshold UCX announces a message before it sends it.
    let announcing = "tcp;RNDV_THRESH=100000";
    let near = Side::new(announcing, 100);
    let options = WorkerOptions { max_message: 1000, ..WorkerOptions::default() };
    let far = Side::with_options(announcing, 100, &options);
    far.worker.accept_messages(1, None).unwrap();
    let endpoint = near.connect(&far.worker.address().unwrap());
    // One that UCX sends eagerly and one that it announces first; then one that fits.
    endpoint.send_am(1, b"eager", vec![1; 1001], 1).unwrap();
    drive("the first drop", &near, &far, || (far.worker.dropped_messages() == 1).then_some(()));
    let large = endpoint.send_am(1, b"announced", vec![2; 4 * MIB], 2).unwrap();
    assert_eq!(large, Posted::Pending);
    let refused =
        drive("the refusal", &near, &far, || near.worker.poll_completion().filter(|completion| completion.token == 2));
    assert_eq!((far.worker.dropped_messages(), far.worker.refused_announcements()), (2, 1));
    assert_eq!(refused.result.unwrap_err().status, Status::UNSUPPORTED);
    endpoint.send_am(1, b"fits", vec![3; 1000], 3).unwrap();
    let message = drive("the message", &near, &far, || far.worker.poll_message());
    assert_eq!((&message.header[..], &message.data[..]), (&b"fits"[..], &[3; 1000][..]));
}

#[test]
fn an_armed_worker_sleeps_until_something_comes() {
    let near = Side::new(TCP, 100);
    near.worker.accept_messages(1, None).unwrap();
    let address = near.worker.address().unwrap();
    let (go, wait_for_go) = std::sync::mpsc::channel::<()>();
    let sender = thread::spawn(move || {
        let far = Side::new(TCP, 100);
        let endpoint = far.connect(&address);
        wait_for_go.recv().unwrap();
        endpoint.send_am(1, b"wake", vec![9; 10], 1).unwrap();
        wait("the end of sending", || {
            far.worker.progress();
            (far.worker.in_flight() == 0).then_some(())
        });
        // The connection must outlive the message.
        wait_for_go.recv().unwrap();
    });
    let sleep = |side: &Side, limit: Duration| {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        let fd = side.worker.event_fd();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap()
    };
    let settle = |side: &Side| {
        wait("an idle worker", || {
            while side.worker.progress() {}
            (side.worker.arm().unwrap() == Armed::Yes).then_some(())
        });
    };
    settle(&near);
    go.send(()).unwrap();
    let message = wait("the message", || {
        while near.worker.progress() {}
        if let Some(message) = near.worker.poll_message() {
            return Some(message);
        }
        if near.worker.arm().unwrap() == Armed::Yes {
            assert_eq!(sleep(&near, LIMIT), 1, "the event fd did not wake");
        }
        None
    });
    assert_eq!(message.data, [9; 10]);
    go.send(()).unwrap();
    sender.join().unwrap();
}

#[test]
fn arming_is_refused_while_something_waits_to_be_polled() {
    let (near, far) = (Side::new(TCP, 100), Side::new(TCP, MIB));
    far.worker.accept_messages(1, None).unwrap();
    let endpoint = near.connect(&far.worker.address().unwrap());
    endpoint.send_am(1, b"", vec![1], 1).unwrap();
    drive("an arrived message that keeps the worker busy", &near, &far, || {
        near.worker.poll_completion();
        // Nothing else is left for UCX to do once the message is here and both sides are quiet.
        (!far.worker.progress() && far.worker.arm().unwrap() == Armed::Busy && near.worker.in_flight() == 0)
            .then_some(())
    });
    assert!(far.worker.poll_message().is_some());
}

#[test]
fn a_forced_close_ends_everything_that_is_under_way() {
    const COUNT: u64 = 200;
    let near = Side::new(TCP, 4 * MIB);
    let far = Side::new(TCP, 4 * MIB);
    far.buffer.fill(5);
    let endpoint = near.connect(&far.worker.address().unwrap());
    let rkey = endpoint.unpack_rkey(&far.memory.pack_rkey().unwrap()).unwrap();
    let id = endpoint.id();
    // The far side is not driven, so nothing can finish.
    for token in 0..COUNT {
        let posted = endpoint.get(&rkey, rkey.base(), &near.memory, 0, MIB, token).unwrap();
        assert_eq!(posted, Posted::Pending);
        near.worker.progress();
    }
    assert_eq!(near.worker.in_flight(), COUNT as usize);
    let close = endpoint.close(true);
    let mut seen = vec![false; COUNT as usize];
    wait("the close", || {
        near.worker.progress();
        while let Some(completion) = near.worker.poll_completion() {
            assert_eq!(completion.endpoint, id);
            assert!(!std::mem::replace(&mut seen[completion.token as usize], true), "a token came twice");
            let error = completion.result.unwrap_err();
            assert_eq!(error.op, "ucp_get_nbx");
        }
        close.is_finished().then_some(())
    });
    assert!(seen.iter().all(|seen| *seen), "not every operation had a completion when the close was finished");
    assert_eq!(near.worker.in_flight(), 0);
    // What the far side still answers must not reach the memory.
    near.buffer.fill(6);
    for _ in 0..1000 {
        far.worker.progress();
        near.worker.progress();
    }
    assert_eq!(mismatch(&near.buffer.read(0..4 * MIB), 6, 0), None, "written after the close was finished");
    // The worker is as good as new: a new connection moves bytes.
    let endpoint = near.connect(&far.worker.address().unwrap());
    let rkey = endpoint.unpack_rkey(&far.memory.pack_rkey().unwrap()).unwrap();
    let posted = endpoint.get(&rkey, rkey.base(), &near.memory, 0, 4 * MIB, 1).unwrap();
    if posted == Posted::Pending {
        drive("the get", &near, &far, || near.worker.poll_completion()).result.unwrap();
    }
    assert_eq!(mismatch(&near.buffer.read(0..4 * MIB), 5, 0), None);
}

#[test]
fn dropping_a_worker_ends_what_is_under_way() {
    let far = Side::new(TCP, MIB);
    let near = Side::new(TCP, MIB);
    let endpoint = near.connect(&far.worker.address().unwrap());
    let rkey = endpoint.unpack_rkey(&far.memory.pack_rkey().unwrap()).unwrap();
    for token in 0..50 {
        endpoint.get(&rkey, rkey.base(), &near.memory, 0, MIB, token).unwrap();
    }
    let Side { worker, memory, buffer, context } = near;
    let weak = Arc::downgrade(&memory);
    worker.close(LIMIT).unwrap();
    drop(memory);
    assert!(weak.upgrade().is_none(), "an operation still holds the memory");
    // What is left of the connection is closed, and says so.
    let error = endpoint.flush(1).unwrap_err();
    assert_eq!(error.status, Status::NOT_CONNECTED);
    drop(endpoint);
    drop(rkey);
    drop(context);
    drop(buffer);
}

#[test]
fn operations_hold_their_memory() {
    let (near, far) = (Side::new(TCP, 100), Side::new(TCP, MIB));
    far.buffer.fill(3);
    let endpoint = near.connect(&far.worker.address().unwrap());
    let rkey = endpoint.unpack_rkey(&far.memory.pack_rkey().unwrap()).unwrap();
    let buffer = Buffer::new(MIB);
    // SAFETY: the buffer outlives the registration: it is dropped at the test's end, after the check below.
    let memory = unsafe { near.context.map(buffer.addr() as usize, MIB, MemoryKind::Host) }.unwrap();
    let weak = Arc::downgrade(&memory);
    let posted = endpoint.get(&rkey, rkey.base(), &memory, 0, MIB, 1).unwrap();
    assert_eq!(posted, Posted::Pending, "the far side was not driven");
    drop((memory, rkey));
    assert!(weak.upgrade().is_some());
    drive("the get", &near, &far, || near.worker.poll_completion()).result.unwrap();
    assert!(weak.upgrade().is_none(), "the registration outlives its operation");
    assert_eq!(mismatch(&buffer.read(0..MIB), 3, 0), None);
}

#[test]
fn connections_come_and_go_without_leaking_descriptors() {
    alone!();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (near, far) = (Side::new(TCP, 64), Side::new(TCP, 64));
    far.worker.accept_messages(1, None).unwrap();
    let address = far.worker.address().unwrap();
    let cycle = |number: u32| {
        let endpoint = near.connect(&address);
        // Every tenth is really used; the others are closed as they are.
        if number.is_multiple_of(10) {
            endpoint.send_am(1, b"", vec![1], 1).unwrap();
            drive("the message", &near, &far, || far.worker.poll_message());
        }
        let close = endpoint.close(true);
        drive("the close", &near, &far, || close.is_finished().then_some(()));
        while near.worker.poll_completion().is_some() {}
    };
    // A leak of one descriptor per used connection would be 100.
    (0..50).for_each(cycle);
    let before = descriptors();
    (0..1000).for_each(cycle);
    wait("the descriptors to be closed", || {
        near.worker.progress();
        far.worker.progress();
        while far.worker.poll_failed_endpoints().is_some() {}
        (descriptors() < before + 50).then_some(())
    });
}

#[test]
fn unknown_settings_are_named() {
    let with = |name: &str, value: &str| {
        let settings = vec![(name.to_owned(), value.to_owned())];
        Context::new(&ContextConfig { tls: Some(TCP.to_owned()), settings, ..ContextConfig::default() })
    };
    let error = with("TCP_TX_SEG_SIZ", "1m").unwrap_err();
    assert_eq!(error.status, Status::NO_ELEM);
    assert!(
        error.detail.contains("\"TCP_TX_SEG_SIZ\"") && error.detail.contains("did you mean TCP_TX_SEG_SIZE?"),
        "{error}"
    );
    let error = with("UCX_NO_SUCH_THING", "1").unwrap_err();
    assert!(error.detail.contains("\"NO_SUCH_THING\"") && error.detail.contains("ucx_info -c"), "{error}");
    let error = with("RNDV_THRESH", "many").unwrap_err();
    assert!(error.detail.contains("\"many\"") && error.detail.contains("RNDV_THRESH"), "{error}");
    assert_eq!(with("", "1").unwrap_err().status, Status::INVALID_PARAM);
    assert_eq!(with("TLS\0", "1").unwrap_err().status, Status::INVALID_PARAM);
    with("TCP_TX_SEG_SIZE", "1m").unwrap();
    with("UCX_RNDV_THRESH", "64k").unwrap();
}

#[test]
fn a_transport_that_does_not_exist_is_an_error() {
    let error = Context::new(&ContextConfig { tls: Some("carrier_pigeon".to_owned()), ..ContextConfig::default() });
    let error = error.unwrap_err();
    assert!(error.detail.contains("carrier_pigeon"), "{error}");
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    let context = context(TCP);
    let buffer = Buffer::new(64);
    // SAFETY: refused before UCX sees it, or outlived by the buffer.
    let map = |addr, len, kind| unsafe { context.map(addr, len, kind) };
    for (addr, len) in [(0, 10), (buffer.addr() as usize, 0), (usize::MAX, 2)] {
        assert_eq!(map(addr, len, MemoryKind::Host).unwrap_err().status, Status::INVALID_PARAM);
    }
    let error = map(buffer.addr() as usize, 64, MemoryKind::Cuda).unwrap_err();
    assert_eq!(error.status, Status::UNSUPPORTED);
    assert!(error.detail.contains("cuda"), "{error}");
    assert!(context.memory_types().contains(MemoryKind::Host));
    assert_eq!(map(buffer.addr() as usize, 64, MemoryKind::Host).unwrap().kind(), MemoryKind::Host);
}

#[test]
fn a_context_serves_several_threads() {
    let context = context(TCP);
    thread::scope(|scope| {
        for number in 0..4u64 {
            let context = &context;
            scope.spawn(move || {
                for round in 0..50 {
                    let buffer = Buffer::new(10_000 + round);
                    // SAFETY: the registration is dropped before the buffer.
                    let memory =
                        unsafe { context.map(buffer.addr() as usize, buffer.len(), MemoryKind::Host) }.unwrap();
                    assert!(!memory.pack_rkey().unwrap().is_empty());
                    if round as u64 % 10 == number {
                        Worker::with_options(context, &WorkerOptions::default()).unwrap().address().unwrap();
                    }
                }
            });
        }
    });
}

#[test]
fn the_library_tells_what_it_is() {
    let library = Library::open(None).unwrap();
    let info = library.info();
    assert!(info.path.is_file(), "{info}");
    assert!(info.number >= (1, 18, 0) && info.version.starts_with("1."), "{info}");
    assert!(Library::others().is_empty(), "{:?}", Library::others());
    assert!(std::ptr::eq(library, Library::open(Some(&info.path.clone())).unwrap()));
    let error = Library::open(Some(std::path::Path::new("/nowhere/libucp.so.0"))).unwrap_err();
    assert_eq!(error.status, Status::INVALID_PARAM);
    assert!(error.detail.contains("/nowhere/libucp.so.0"), "{error}");
}
