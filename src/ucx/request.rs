//! Operations under way: what each keeps alive, and how its end gets from UCX's callback to the owner.

use std::cell::Cell;
use std::os::raw::c_void;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use ucx_sys::{ucp_dt_iov_t, ucp_request_param_t, ucs_status_ptr_t, ucs_status_t};

use super::memory::Memory;
use super::queue::{Queue, change};
use super::status::{PostResult, Status, UcxError, post_result};

/// The result of posting an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Posted {
    /// It is complete; there will be no [`Completion`].
    Done,
    /// It is under way; its [`Completion`] will come from
    /// [`Worker::poll_completion`](super::Worker::poll_completion).
    Pending,
}

/// The end of an operation that was [`Posted::Pending`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The poster's number for it.
    pub token: u64,
    /// The [`id`](super::Endpoint::id) of its endpoint.
    pub endpoint: u64,
    /// How it ended. After this UCX no longer touches its memory.
    pub result: Result<(), UcxError>,
}

/// Why an operation is under way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Posted by the owner, who waits for the token. The name is for errors.
    User { op: &'static str, token: u64 },
    /// The closing of its endpoint.
    Close,
}

/// One operation, from posting until it was reaped, of an owner `O` that it holds. Its address is UCX's `user_data`.
pub(super) struct PostedOperation<O> {
    /// Where the callback puts this operation.
    done: Rc<Queue<*mut PostedOperation<O>>>,
    /// Its place in [`OperationSet::live`].
    index: usize,
    request: *mut c_void,
    status: ucs_status_t,
    pub(super) purpose: Purpose,
    // Kept alive until UCX is done with them.
    pub(super) owner: Option<O>,
    pub(super) memory: Option<Arc<Memory>>,
    pub(super) parts: Vec<Arc<Memory>>,
    pub(super) iov: Vec<ucp_dt_iov_t>,
    pub(super) header: Vec<u8>,
    pub(super) data: Vec<u8>,
}

impl<O> PostedOperation<O> {
    pub(super) fn status(&self) -> Status {
        Status::from_raw(self.status)
    }

    fn clear(&mut self) {
        self.request = ptr::null_mut();
        self.status = ucx_sys::UCS_OK;
        self.owner = None;
        self.memory = None;
        self.parts.clear();
        self.iov.clear();
        self.header = Vec::new();
        self.data = Vec::new();
    }
}

/// How many finished operations are kept for reuse: about the number that a windowed transfer has under way.
const SPARE: usize = 1024;

/// Large buffers that messages were sent from and that are kept for reuse: their number, and the capacities in bytes that
/// are worth it.
const SPARE_BUFFERS: usize = 8;
const SPARE_BUFFER_BYTES: std::ops::RangeInclusive<usize> = 64 << 10..=1 << 20;

/// The buffers of an operation, where they lie while it is live.
pub(super) struct Buffers {
    pub(super) header: (*const u8, usize),
    pub(super) data: (*mut u8, usize),
    pub(super) iov: (*const ucp_dt_iov_t, usize),
}

/// All operations of a worker. One that is still live when this is dropped is leaked with all that it keeps
/// alive, because UCX may still use it.
pub(super) struct OperationSet<O> {
    done: Rc<Queue<*mut PostedOperation<O>>>,
    live: Cell<Vec<*mut PostedOperation<O>>>,
    // Boxed because an operation's address is given to UCX, so it must not move when it is taken from here.
    #[allow(clippy::vec_box)]
    spare: Cell<Vec<Box<PostedOperation<O>>>>,
    buffers: Cell<Vec<Vec<u8>>>,
}

impl<O> OperationSet<O> {
    pub(super) fn new() -> Self {
        Self { done: Rc::new(Queue::new()), live: Cell::default(), spare: Cell::default(), buffers: Cell::default() }
    }

    /// The number that are under way or not yet reaped.
    pub(super) fn live(&self) -> usize {
        change(&self.live, |live| live.len())
    }

    /// True when nothing is live but closing endpoints.
    pub(super) fn only_closes(&self) -> bool {
        // SAFETY: the pointers in `live` are those of live operations, none of which is borrowed here.
        change(&self.live, |live| live.iter().all(|raw| unsafe { (**raw).purpose } == Purpose::Close))
    }

    /// Makes all live operations release their owners. They are never reaped: UCX keeps their addresses.
    pub(super) fn abandon(&self) {
        let owners: Vec<_> = change(&self.live, |live| {
            // SAFETY: as in `only_closes`.
            live.iter().map(|raw| unsafe { (**raw).owner.take() }).collect()
        });
        drop(owners);
    }

    /// True when a callback has come that was not reaped.
    pub(super) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Starts an operation: `fill` puts into it what it keeps alive, `start` hands its buffers to UCX with
    /// parameters whose callback and user data are set, and returns what UCX's function returned.
    pub(super) fn post(
        &self,
        purpose: Purpose,
        fill: impl FnOnce(&mut PostedOperation<O>),
        start: impl FnOnce(&Buffers, &mut ucp_request_param_t) -> ucs_status_ptr_t,
    ) -> Result<Posted, Status> {
        let mut operation = change(&self.spare, Vec::pop).unwrap_or_else(|| {
            Box::new(PostedOperation {
                done: Rc::clone(&self.done),
                index: 0,
                request: ptr::null_mut(),
                status: ucx_sys::UCS_OK,
                purpose,
                owner: None,
                memory: None,
                parts: Vec::new(),
                iov: Vec::new(),
                header: Vec::new(),
                data: Vec::new(),
            })
        });
        operation.purpose = purpose;
        fill(&mut operation);
        let buffers = Buffers {
            header: (operation.header.as_ptr(), operation.header.len()),
            data: (operation.data.as_mut_ptr(), operation.data.len()),
            iov: (operation.iov.as_ptr(), operation.iov.len()),
        };
        let raw = self.enter(operation);
        // SAFETY: all-zero is valid for this C structure of integers, pointers and nullable functions.
        let mut param: ucp_request_param_t = unsafe { std::mem::MaybeUninit::zeroed().assume_init() };
        param.op_attr_mask = ucx_sys::UCP_OP_ATTR_FIELD_USER_DATA.0 | ucx_sys::UCP_OP_ATTR_FIELD_CALLBACK.0;
        param.user_data = raw.cast();
        param.cb.send = Some(on_sent::<O>);
        match post_result(start(&buffers, &mut param)) {
            PostResult::Pending(request) => {
                // SAFETY: the operation is live, as only `reap` and the two arms below end it; nothing borrows it.
                unsafe { (*raw).request = request };
                Ok(Posted::Pending)
            }
            PostResult::Done => {
                self.recycle(self.leave(raw));
                Ok(Posted::Done)
            }
            PostResult::Failed(status) => {
                self.recycle(self.leave(raw));
                Err(status)
            }
        }
    }

    /// Takes one finished operation out. The caller gives it to [`Self::recycle`] when it has used it, and
    /// frees its request first.
    pub(super) fn reap(&self) -> Option<(Box<PostedOperation<O>>, *mut c_void)> {
        let operation = self.leave(self.done.pop()?);
        let request = operation.request;
        Some((operation, request))
    }

    /// Releases the memory and owners that the operation kept alive. Calls UCX when that was the last owner.
    pub(super) fn recycle(&self, mut operation: Box<PostedOperation<O>>) {
        self.keep_buffer(std::mem::take(&mut operation.data));
        operation.clear();
        if change(&self.spare, |spare| spare.len()) < SPARE {
            change(&self.spare, |spare| spare.push(operation));
        }
    }

    fn keep_buffer(&self, mut buffer: Vec<u8>) {
        if !SPARE_BUFFER_BYTES.contains(&buffer.capacity()) {
            return;
        }
        buffer.clear();
        change(&self.buffers, |buffers| {
            if buffers.len() < SPARE_BUFFERS {
                buffers.push(buffer);
            }
        });
    }

    /// An empty buffer with room for `len` bytes.
    pub(super) fn buffer(&self, len: usize) -> Vec<u8> {
        // Those used last, which the processor's caches know best, are at the end.
        let found = change(&self.buffers, |buffers| {
            buffers.iter().rposition(|buffer| buffer.capacity() >= len).map(|at| buffers.swap_remove(at))
        });
        found.unwrap_or_else(|| Vec::with_capacity(len))
    }

    fn enter(&self, mut operation: Box<PostedOperation<O>>) -> *mut PostedOperation<O> {
        change(&self.live, |live| {
            operation.index = live.len();
            let raw = Box::into_raw(operation);
            live.push(raw);
            raw
        })
    }

    fn leave(&self, raw: *mut PostedOperation<O>) -> Box<PostedOperation<O>> {
        // SAFETY: every pointer given here came from `enter` and is given once: by `post` when UCX took no
        // callback, else by `reap`, from the queue to which its one callback pushed it.
        let operation = unsafe { Box::from_raw(raw) };
        change(&self.live, |live| {
            if operation.index < live.len() {
                live.swap_remove(operation.index);
                if let Some(moved) = live.get(operation.index) {
                    // SAFETY: the pointers in `live` are those of live operations, none of which is borrowed here.
                    unsafe { (**moved).index = operation.index };
                }
            }
        });
        operation
    }
}

/// UCX's callback, on the worker's thread, at the end of an operation that sends, reads, writes, flushes or closes. Notes the
/// end and nothing more: no call of UCX, nothing dropped, nothing that unwinds.
unsafe extern "C" fn on_sent<O>(_request: *mut c_void, status: ucs_status_t, user_data: *mut c_void) {
    let operation = user_data.cast::<PostedOperation<O>>();
    // SAFETY: the address is that of a live operation, from `post`, which names the callback with its own `O`; this is its one
    // callback. Nothing borrows a live operation while UCX runs.
    unsafe {
        (*operation).status = status;
        (*(*operation).done).push(operation);
    }
}
