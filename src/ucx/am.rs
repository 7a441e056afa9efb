//! Active messages as they arrive: copied out of UCX's callback, or fetched after it when UCX announces a
//! large one (rendezvous).

use std::cell::Cell;
use std::os::raw::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;

use ucx_sys::{ucp_am_recv_param_t, ucs_status_t};

use super::queue::Queue;
use super::request::{Operation, Purpose, on_received};
use super::worker::WorkerCore;

/// An active message that has arrived whole.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AmMessage {
    /// The id under which it was sent.
    pub id: u16,
    /// The sender's header.
    pub header: Vec<u8>,
    /// The sender's data; empty if the sink took it.
    pub data: Vec<u8>,
}

/// Takes the data of messages while it lies in UCX's own buffer.
pub trait MessageSink {
    /// Whether it took the data: then only the header is [delivered](super::Worker::poll_message). Called on the worker's
    /// thread while UCX works: must not use UCX, wait or panic (a panic counts as not taken).
    fn take(&self, header: &[u8], data: &[u8]) -> bool;
}

/// A message that UCX announced and that is to be fetched.
struct Announced {
    id: u16,
    header: Vec<u8>,
    /// UCX's descriptor: to be given to ucp_am_recv_data_nbx or ucp_am_data_release, once.
    descriptor: *mut c_void,
    length: usize,
}

/// A worker's messages.
pub(super) struct Messages {
    ready: Queue<AmMessage>,
    announced: Queue<Announced>,
    limit: usize,
    dropped: Cell<u64>,
}

/// What UCX hands to the callback: one per accepted id, alive as long as the UCX worker.
pub(super) struct Slot {
    messages: Rc<Messages>,
    id: u16,
    sink: Option<Rc<dyn MessageSink>>,
}

impl Slot {
    pub(super) fn new(messages: &Rc<Messages>, id: u16, sink: Option<Rc<dyn MessageSink>>) -> Self {
        Self { messages: Rc::clone(messages), id, sink }
    }
}

impl Messages {
    pub(super) fn new(limit: usize) -> Self {
        Self { ready: Queue::new(), announced: Queue::new(), limit, dropped: Cell::new(0) }
    }

    pub(super) fn pop(&self) -> Option<AmMessage> {
        self.ready.pop()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.announced.is_empty()
    }

    /// Takes a fetched message out of its operation.
    pub(super) fn arrived(&self, id: u16, operation: &mut Operation) {
        let (header, data) = (std::mem::take(&mut operation.header), std::mem::take(&mut operation.data));
        self.ready.push(AmMessage { id, header, data });
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    pub(super) fn count_dropped(&self) {
        self.dropped.set(self.dropped.get().saturating_add(1));
    }

    /// Starts fetching what was announced. True when there was anything.
    pub(super) fn fetch(&self, worker: &WorkerCore) -> bool {
        let mut any = false;
        while let Some(announced) = self.announced.pop() {
            any = true;
            self.fetch_one(worker, announced);
        }
        any
    }

    fn fetch_one(&self, worker: &WorkerCore, announced: Announced) {
        let Announced { id, header, descriptor, length } = announced;
        let mut data = Vec::new();
        if data.try_reserve_exact(length).is_err() {
            log::error!("a message of {length} bytes was dropped: memory for it could not be allocated");
            self.count_dropped();
            worker.release_message(descriptor);
            return;
        }
        data.resize(length, 0);
        // Where UCX writes the length when it is done at once; it is `length` then.
        let mut received = 0usize;
        let posted = worker.operations().post_recovering(
            Purpose::Receive { id },
            |operation| {
                operation.header = header;
                operation.data = data;
            },
            |buffers, param| {
                param.op_attr_mask |= ucx_sys::UCP_OP_ATTR_FIELD_MEMORY_TYPE.0 | ucx_sys::UCP_OP_ATTR_FIELD_RECV_INFO.0;
                param.memory_type = ucx_sys::UCS_MEMORY_TYPE_HOST;
                param.cb.recv_am = Some(on_received);
                param.recv_info.length = &mut received;
                // SAFETY: worker and descriptor are alive and the descriptor is used once; the operation owns
                // the buffer of `data.1` bytes until UCX is done.
                unsafe {
                    worker.api().ucp_am_recv_data_nbx(
                        worker.handle(),
                        descriptor,
                        buffers.data.0.cast(),
                        buffers.data.1,
                        param,
                    )
                }
            },
            |operation| self.arrived(id, operation),
        );
        if let Err(status) = posted {
            log::warn!("a message of {length} bytes was lost: ucp_am_recv_data_nbx: {status}");
            self.count_dropped();
        }
    }

    /// Gives back what was announced and never fetched.
    pub(super) fn release_announced(&self, worker: &WorkerCore) {
        while let Some(announced) = self.announced.pop() {
            worker.release_message(announced.descriptor);
        }
    }
}

/// UCX's callback for a message. Copies or notes it; calls nothing of UCX, drops nothing of UCX's, and cannot
/// unwind: allocations are tried, and a message without room is counted and dropped.
pub(super) unsafe extern "C" fn on_message(
    slot: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: `slot` is the argument given with the handler; it lives as long as the UCX worker.
    let slot = unsafe { &*slot.cast::<Slot>() };
    let messages = &*slot.messages;
    // SAFETY: UCX passes valid parameters for the time of the callback.
    let announced = unsafe { (*param).recv_attr } & u64::from(ucx_sys::UCP_AM_RECV_ATTR_FLAG_RNDV.0) != 0;
    // What refuses an announced message at its sender; an eager one is here already, and only UCS_OK is allowed.
    let refusal = if announced { ucx_sys::UCS_ERR_EXCEEDS_LIMIT } else { ucx_sys::UCS_OK };
    // SAFETY: UCX says that the header has this many bytes, valid during the callback.
    let header = unsafe { copy(header, header_length) };
    let (Some(header), true) = (header, length <= messages.limit) else {
        messages.count_dropped();
        return refusal;
    };
    if announced {
        messages.announced.push(Announced { id: slot.id, header, descriptor: data, length });
        return ucx_sys::UCS_INPROGRESS;
    }
    if let Some(sink) = slot.sink.as_ref().filter(|_| length > 0) {
        // SAFETY: without the rendezvous flag `data` points to `length` bytes, valid and unchanged during the callback.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) };
        let taken = catch_unwind(AssertUnwindSafe(|| sink.take(&header, bytes))).unwrap_or_else(|payload| {
            // It may panic again when it is dropped.
            std::mem::forget(payload);
            false
        });
        if taken {
            messages.ready.push(AmMessage { id: slot.id, header, data: Vec::new() });
            return ucx_sys::UCS_OK;
        }
    }
    // SAFETY: as above.
    match unsafe { copy(data, length) } {
        Some(data) => messages.ready.push(AmMessage { id: slot.id, header, data }),
        None => messages.count_dropped(),
    }
    ucx_sys::UCS_OK
}

/// # Safety
/// When `length` is not 0, `start` points to that many readable bytes.
unsafe fn copy(start: *const c_void, length: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    if length == 0 {
        return Some(bytes);
    }
    bytes.try_reserve_exact(length).ok()?;
    // SAFETY: room was reserved, the source is readable as promised, and a fresh allocation overlaps nothing.
    unsafe {
        ptr::copy_nonoverlapping(start.cast::<u8>(), bytes.as_mut_ptr(), length);
        bytes.set_len(length);
    }
    Some(bytes)
}
