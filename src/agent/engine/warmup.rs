//! Warms UCX up with a stand-in before the first peer comes.
//!
//! For a worker's first connection over some transports and devices, UCX weighs its protocols, and asks each network device
//! for its properties again for every one of them: most of the time from first contact to the first byte. It keeps what it
//! found for the worker's later connections of the same kind. So an agent connects at its start to a worker of its own
//! process, which UCX reaches as any process of this host. `kvferry bench handshake` prints what a first contact takes, with
//! and without (`KVFERRY_WARM_UP=0`).
//!
//! UCX tells peers of other hosts apart by their addresses, and weighs anew for the first of them.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::agent::core::frame::{AM_ID, FRAME_BYTES};
use crate::agent::core::limits::CHUNK_BYTES;
use crate::ucx::{CloseRequest, Context, UcxError, Worker, WorkerOptions};

/// Longest time for the messages to one stand-in, and for its end. It takes some hundredths of a second.
const LIMIT: Duration = Duration::from_secs(5);
/// Bytes of the messages: UCX chooses a protocol for each range of lengths.
const LENGTHS: [usize; 3] = [256, 16 << 10, CHUNK_BYTES as usize];

/// Connects to a stand-in of `context`, which has the settings of the worker's. What goes wrong is no harm: then the first peer waits.
pub(crate) fn warm_up(name: &str, worker: &Worker, context: &Arc<Context>) {
    let begun = Instant::now();
    match meet(worker, context) {
        Ok(()) => log::debug!("agent {name}: warmed up a connection in {:?}", begun.elapsed()),
        Err(error) => log::info!("agent {name}: the first connections take longer, the warm-up failed: {error}"),
    }
}

/// Connects to a new worker of `context`, talks, and parts.
fn meet(worker: &Worker, context: &Arc<Context>) -> Result<(), UcxError> {
    let options = WorkerOptions { name: "stand-in".to_owned(), max_message: CHUNK_BYTES as usize };
    let stand_in = Worker::with_options(context, &options)?;
    stand_in.accept_messages(AM_ID, None)?;
    let there = worker.connect(&stand_in.address()?, "stand-in")?;
    let back = stand_in.connect(&worker.address()?, "stand-in")?;
    let mut sent = Ok(());
    for (token, len) in LENGTHS.into_iter().enumerate() {
        for endpoint in [&there, &back] {
            sent = sent.and_then(|()| endpoint.send_am(AM_ID, &[0; FRAME_BYTES], vec![0; len], token as u64).map(drop));
        }
    }
    let (mut heard, mut answers) = (0, 0);
    drive([worker, &stand_in], || {
        heard += std::iter::from_fn(|| stand_in.poll_message()).count();
        answers += std::iter::from_fn(|| worker.poll_message()).count();
        sent.is_err() || (heard.min(answers) >= LENGTHS.len() && worker.in_flight() + stand_in.in_flight() == 0)
    });
    let ends = [there.close(false), back.close(false)];
    drive([worker, &stand_in], || ends.iter().all(CloseRequest::is_finished));
    drop(stand_in);
    // Nobody else has connected yet: all that is left is of the stand-in.
    while worker.poll_message().is_some() {}
    while worker.poll_completion().is_some() {}
    while worker.poll_failed_endpoints().is_some() {}
    sent
}

/// Lets both work until `done` or the limit.
fn drive(workers: [&Worker; 2], mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() && begun.elapsed() < LIMIT {
        let [first, second] = workers.map(Worker::progress);
        for worker in workers {
            while worker.poll_completion().is_some() {}
        }
        if !(first || second) {
            thread::sleep(Duration::from_micros(20));
        }
    }
}
