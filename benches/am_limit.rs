//! What UCX's own active messages of 1 MiB reach over TCP between two processes, without kvferry's agent:
//! `cargo bench --bench am_limit -- BYTES`, or driven by `scripts/bench`.
//!
//! For each line on its input it moves BYTES bytes twice and prints a line of JSON: `seconds` until the last message
//! has arrived, `placed_s` the same with every message copied to its place in memory on arrival, and `cpu_s`, the
//! processor time of both processes for the first. Without input it does 15 rounds and prints the medians. The
//! messages are eager ones, which UCX does not cut: its TCP segments are made larger than a message. The copied bytes
//! are compared.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::ffi::{CString, c_void};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::ptr;
use std::time::{Duration, Instant};

use kvferry::ucx::Library;
use ucx_sys::{Ucp, ucp_am_recv_param_t, ucp_ep_h, ucp_worker_h, ucs_status_t};

const MESSAGE: usize = 1 << 20;
const ID: u32 = 1;
/// Messages under way at once.
const WINDOW: usize = 8;
/// How long to look for work before sleeping.
const SPIN: Duration = Duration::from_micros(300);
const SENDER: &str = "KVFERRY_AM_LIMIT_SENDER";
const ROUNDS: usize = 15;
const SETTINGS: [(&str, &str); 4] =
    [("TLS", "tcp"), ("RNDV_THRESH", "inf"), ("TCP_TX_SEG_SIZE", "1280K"), ("TCP_RX_SEG_SIZE", "1280K")];

fn ok(status: ucs_status_t) {
    assert!(status == ucx_sys::UCS_OK, "UCX status {}", status.0);
}

fn zeroed<T>() -> T {
    // SAFETY: only used for C structures of integers, pointers and nullable functions.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// A context and a worker of this thread, kept until the process ends.
fn worker() -> (&'static Ucp, ucp_worker_h) {
    let path = Library::open(None).unwrap().info().path.clone();
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: it is the libucp that was opened and checked above.
    let api: &'static Ucp = Box::leak(Box::new(unsafe { Ucp::new(path.to_str().unwrap()) }.unwrap()));
    let (mut config, mut context, mut worker) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let mut params: ucx_sys::ucp_params_t = zeroed();
    params.field_mask = u64::from(ucx_sys::UCP_PARAM_FIELD_FEATURES.0);
    params.features = u64::from(ucx_sys::UCP_FEATURE_AM.0 | ucx_sys::UCP_FEATURE_WAKEUP.0);
    let mut options: ucx_sys::ucp_worker_params_t = zeroed();
    options.field_mask = u64::from(ucx_sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE.0);
    options.thread_mode = ucx_sys::UCS_THREAD_MODE_SINGLE;
    // SAFETY: all arguments live during the calls, which copy what they keep.
    unsafe {
        ok(api.ucp_config_read(ptr::null(), ptr::null(), &mut config));
        for (name, value) in SETTINGS {
            let (name, value) = (CString::new(name).unwrap(), CString::new(value).unwrap());
            ok(api.ucp_config_modify(config, name.as_ptr(), value.as_ptr()));
        }
        ok(api.ucp_init_version(1, 18, &params, config, &mut context));
        ok(api.ucp_worker_create(context, &options, &mut worker));
    }
    (api, worker)
}

/// Keeps this process on one processor, another one for each role: on few and busy ones, the scheduler else puts both on
/// the same, where neither can move what the other waits for.
fn stay(role: usize) {
    let mut allowed: libc::cpu_set_t = zeroed();
    // SAFETY: the set is a plain bit field of the size that is told, and 0 is this process.
    unsafe {
        let size = std::mem::size_of::<libc::cpu_set_t>();
        assert!(libc::sched_getaffinity(0, size, &mut allowed) == 0);
        let all: Vec<usize> =
            (0..libc::CPU_SETSIZE as usize).filter(|&processor| libc::CPU_ISSET(processor, &allowed)).collect();
        if all.len() > 1 {
            let mut one: libc::cpu_set_t = zeroed();
            libc::CPU_SET(all[role], &mut one);
            assert!(libc::sched_setaffinity(0, size, &one) == 0);
        }
    }
}

/// The bytes that are sent: each word differs.
fn content(bytes: usize) -> Vec<u64> {
    (0..bytes.div_ceil(8) as u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1).collect()
}

/// The other process: connects to the address on its first line, sends once per further line.
fn sender(bytes: usize) {
    let (api, worker) = worker();
    let data = content(bytes);
    let mut lines = std::io::stdin().lock().lines();
    let digits = lines.next().unwrap().unwrap();
    let address: Vec<u8> =
        digits.as_bytes().chunks(2).map(|p| u8::from_str_radix(std::str::from_utf8(p).unwrap(), 16).unwrap()).collect();
    let mut params: ucx_sys::ucp_ep_params_t = zeroed();
    params.field_mask = u64::from(ucx_sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS.0);
    params.address = address.as_ptr().cast();
    let mut ep: ucp_ep_h = ptr::null_mut();
    // SAFETY: worker and address are alive.
    unsafe { ok(api.ucp_ep_create(worker, &params, &mut ep)) };
    for line in lines {
        let bytes: usize = line.unwrap().parse().unwrap();
        let mut under_way: Vec<*mut c_void> = Vec::new();
        for start in (0..bytes).step_by(MESSAGE) {
            let length = MESSAGE.min(bytes - start);
            let place = start as u64;
            let mut param: ucx_sys::ucp_request_param_t = zeroed();
            param.op_attr_mask = ucx_sys::UCP_OP_ATTR_FIELD_FLAGS.0;
            // The header is on this stack, so UCX is told to copy it.
            param.flags = ucx_sys::UCP_AM_SEND_FLAG_EAGER.0 | ucx_sys::UCP_AM_SEND_FLAG_COPY_HEADER.0;
            // SAFETY: the data outlive the process's last progress; the header is copied.
            let request = unsafe {
                let from = data.as_ptr().cast::<u8>().add(start).cast();
                api.ucp_am_send_nbx(ep, ID, (&raw const place).cast(), 8, from, length, &param)
            };
            assert!(!(-200..0).contains(&(request as isize)), "sending failed: {}", request as isize);
            if !request.is_null() {
                under_way.push(request);
            }
            drive(api, worker, &mut under_way, WINDOW);
        }
        drive(api, worker, &mut under_way, 1);
    }
}

/// Sleeps until UCX has something to do, if it has nothing for a while: on a busy machine the other process may be
/// waiting for this very processor.
fn wait(api: &Ucp, worker: ucp_worker_h) {
    let begin = Instant::now();
    while begin.elapsed() < SPIN {
        // SAFETY: the worker is this thread's.
        if unsafe { api.ucp_worker_progress(worker) } != 0 {
            return;
        }
    }
    let mut file = 0;
    // SAFETY: the worker is this thread's; the file descriptor is its own.
    unsafe {
        ok(api.ucp_worker_get_efd(worker, &mut file));
        if api.ucp_worker_arm(worker) == ucx_sys::UCS_OK {
            let mut waited = libc::pollfd { fd: file, events: libc::POLLIN, revents: 0 };
            libc::poll(&mut waited, 1, 1000);
        }
    }
}

/// Drives UCX until fewer than `most` sends are under way.
fn drive(api: &Ucp, worker: ucp_worker_h, under_way: &mut Vec<*mut c_void>, most: usize) {
    while under_way.len() >= most {
        // SAFETY: the worker is this thread's.
        if unsafe { api.ucp_worker_progress(worker) } == 0 {
            wait(api, worker);
        }
        // SAFETY: each request is freed once, when UCX is done with it.
        unsafe {
            under_way.retain(|&request| {
                let status = api.ucp_request_check_status(request);
                if status != ucx_sys::UCS_INPROGRESS {
                    ok(status);
                    api.ucp_request_free(request);
                }
                status == ucx_sys::UCS_INPROGRESS
            });
        }
    }
}

/// What the callback works on.
struct Arrivals {
    bytes: usize,
    place: bool,
    memory: Vec<u64>,
}

unsafe extern "C" fn on_message(
    arrivals: *mut c_void,
    header: *const c_void,
    _: usize,
    data: *mut c_void,
    length: usize,
    _: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: the argument given with the handler, which outlives the worker; only this thread uses it.
    let arrivals = unsafe { &mut *arrivals.cast::<Arrivals>() };
    arrivals.bytes += length;
    if arrivals.place {
        // SAFETY: the header holds the offset that the other process put there, inside the memory of equal size.
        unsafe {
            let at = ptr::read_unaligned(header.cast::<u64>()) as usize;
            assert!(at + length <= arrivals.memory.len() * 8);
            ptr::copy_nonoverlapping(data.cast::<u8>(), arrivals.memory.as_mut_ptr().cast::<u8>().add(at), length);
        }
    }
    ucx_sys::UCS_OK
}

/// Processor time of a process with all its threads, in seconds.
fn cpu(pid: u32) -> f64 {
    let mut time: libc::timespec = zeroed();
    // SAFETY: the clock of a living process, whose number follows from its id; it goes into `time`.
    assert!(unsafe { libc::clock_gettime((!(pid as i32) << 3) | 2, &mut time) } == 0);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

struct Receiver {
    api: &'static Ucp,
    worker: ucp_worker_h,
    arrivals: *mut Arrivals,
    child: Child,
    orders: ChildStdin,
    bytes: usize,
}

impl Receiver {
    fn start(bytes: usize) -> Self {
        let (api, worker) = worker();
        let memory = vec![0; bytes.div_ceil(8)];
        let arrivals = Box::into_raw(Box::new(Arrivals { bytes: 0, place: false, memory }));
        let mut param: ucx_sys::ucp_am_handler_param_t = zeroed();
        param.field_mask = u64::from(
            ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_ID.0
                | ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_FLAGS.0
                | ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_CB.0
                | ucx_sys::UCP_AM_HANDLER_PARAM_FIELD_ARG.0,
        );
        param.id = ID;
        param.flags = ucx_sys::UCP_AM_FLAG_WHOLE_MSG.0;
        param.cb = Some(on_message);
        param.arg = arrivals.cast();
        let (mut address, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the worker is alive; the address is read before anything releases it, and never released.
        let digits: String = unsafe {
            ok(api.ucp_worker_set_am_recv_handler(worker, &param));
            ok(api.ucp_worker_get_address(worker, &mut address, &mut length));
            std::slice::from_raw_parts(address.cast::<u8>(), length).iter().map(|b| format!("{b:02x}")).collect()
        };
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg(bytes.to_string())
            .env(SENDER, "1")
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut orders = child.stdin.take().unwrap();
        writeln!(orders, "{digits}").unwrap();
        Self { api, worker, arrivals, child, orders, bytes }
    }

    /// Moves `bytes` bytes once: seconds, and processor seconds of both processes.
    fn round(&mut self, bytes: usize, place: bool) -> (f64, f64) {
        // SAFETY: only the callback uses it too, inside `ucp_worker_progress`.
        unsafe { ((*self.arrivals).bytes, (*self.arrivals).place) = (0, place) };
        let pids = [self.child.id(), std::process::id()];
        let before: f64 = pids.into_iter().map(cpu).sum();
        let start = Instant::now();
        writeln!(self.orders, "{bytes}").unwrap();
        loop {
            // SAFETY: the worker is this thread's.
            if unsafe { self.api.ucp_worker_progress(self.worker) } == 0 {
                wait(self.api, self.worker);
            }
            // SAFETY: the callback, which uses it too, has returned.
            if unsafe { (*self.arrivals).bytes } >= bytes {
                break;
            }
        }
        (start.elapsed().as_secs_f64(), pids.into_iter().map(cpu).sum::<f64>() - before)
    }

    fn both(&mut self) -> [f64; 3] {
        // As the engines that it is set beside: one small transfer, a pause, then the round.
        self.round(MESSAGE.min(self.bytes), true);
        std::thread::sleep(Duration::from_millis(5));
        let (seconds, cpu_s) = self.round(self.bytes, false);
        // SAFETY: no message is under way, so the callback does not run.
        unsafe { (*self.arrivals).memory.fill(0) };
        let (placed_s, _) = self.round(self.bytes, true);
        // SAFETY: as above.
        assert!(unsafe { &(*self.arrivals).memory } == &content(self.bytes), "bytes differ");
        [seconds, placed_s, cpu_s]
    }
}

fn main() {
    let bytes = std::env::args().skip(1).find_map(|a| a.parse::<usize>().ok()).unwrap_or(32 << 20);
    assert!(bytes > 0 && bytes.is_multiple_of(8), "BYTES must be a multiple of 8");
    if std::env::var_os(SENDER).is_some() {
        stay(1);
        return sender(bytes);
    }
    let mut receiver = Receiver::start(bytes);
    stay(0);
    let print = |[seconds, placed_s, cpu_s]: [f64; 3]| {
        println!(r#"{{"seconds": {seconds}, "placed_s": {placed_s}, "cpu_s": {cpu_s}}}"#);
        std::io::stdout().flush().unwrap();
    };
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    if std::env::var_os("CARGO").is_some() || std::io::stdin().is_terminal() {
        let mut rounds: Vec<[f64; 3]> = (0..=ROUNDS).map(|_| receiver.both()).skip(1).collect();
        print([0, 1, 2].map(|which| {
            rounds.sort_by(|a, b| a[which].total_cmp(&b[which]));
            rounds[ROUNDS / 2][which]
        }));
    } else {
        while input.read_line(&mut line).unwrap() > 0 {
            line.clear();
            print(receiver.both());
        }
    }
    drop(receiver.orders);
    receiver.child.wait().unwrap();
}
