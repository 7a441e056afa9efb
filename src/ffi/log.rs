//! Log lines for the host: to its callback, or to standard error.

use std::env;
use std::ffi::{CString, c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, PoisonError, RwLock, TryLockError};

use log::{Level, LevelFilter, Log, Metadata, Record};

use super::boundary::{call_back, is_in_callback};
use crate::error::Error;
use crate::sys::fork::PerProcess;

/// Gets one log line. `level` is 1 (error), 2 (warn), 3 (info), 4 (debug) or 5 (trace); `target` names the module,
/// such as "kvferry::agent". Both strings end with the call.
///
/// It may come from any thread, also from several at once, and that thread does nothing else until it returns. It must return:
/// a C++ exception or the end of its thread ends the process. It may call kvf_last_error, kvf_status_name and the versions;
/// every other function gives KVF_INVALID_ARGUMENT on its thread, and lines that it causes itself are dropped.
pub type kvf_log_callback =
    Option<unsafe extern "C-unwind" fn(level: u32, target: *const c_char, message: *const c_char, user: *mut c_void)>;

#[derive(Clone, Copy)]
struct LogCallback {
    // One that unwinds is noticed, see `call_back`.
    call: unsafe extern "C-unwind" fn(u32, *const c_char, *const c_char, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the contract of `kvf_log_set` is that the callback may be called with `user` from any thread.
unsafe impl Send for LogCallback {}
// SAFETY: as above, also from several threads at once.
unsafe impl Sync for LogCallback {}

/// Where this process's lines go.
struct LogOutput {
    /// Readers hold the lock while they call, so that a writer knows that no call is running when it has the lock.
    sink: RwLock<Option<LogCallback>>,
    started: Once,
}

/// A process that was forked off goes on with the callback of the other one, unless that was just being replaced.
static LINES: PerProcess<LogOutput> = PerProcess::new(|earlier: Option<&LogOutput>| {
    let sink = earlier.and_then(|earlier| match earlier.sink.try_read() {
        Ok(sink) => *sink,
        Err(TryLockError::Poisoned(sink)) => *sink.into_inner(),
        Err(TryLockError::WouldBlock) => None,
    });
    LogOutput { sink: RwLock::new(sink), started: Once::new() }
});

/// True if the logger was set, or is just being set, here or in the process from which this one was forked.
static LOGGER_SET: AtomicBool = AtomicBool::new(false);

struct HostLogger;

impl Log for HostLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) || is_in_callback() {
            return;
        }
        let sink = LINES.get().sink.read().unwrap_or_else(PoisonError::into_inner);
        match *sink {
            Some(sink) => call(sink, record),
            None => print(record),
        }
    }

    fn flush(&self) {}
}

fn call(sink: LogCallback, record: &Record<'_>) {
    let target = c_text(record.target());
    let message = c_text(&record.args().to_string());
    // SAFETY: the callback was given for calls from any thread until it is unset, which waits for the lock that the
    // caller holds; both strings are live and end with a NUL.
    call_back(|| unsafe { (sink.call)(record.level() as u32, target.as_ptr(), message.as_ptr(), sink.user) });
}

fn print(record: &Record<'_>) {
    let line = format!("kvferry {} {}: {}\n", record.level(), record.target(), record.args());
    // In one write, as UCX and the other processes of an engine write there too, and without a lock, of which a fork could
    // make a copy that is held. It may be closed; there is no better place to say so.
    let mut left = line.as_bytes();
    while !left.is_empty() {
        match rustix::io::write(rustix::stdio::stderr(), left) {
            Ok(written) if written > 0 => left = left.get(written..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "?")).unwrap_or_default()
}

/// Makes this module the process's logger, once. Every `kvf_*_start` calls it. A Rust program that embeds the library
/// and has a logger keeps it.
pub(super) fn start() {
    LINES.get().started.call_once(|| {
        // Setting one waits for another thread that does, which a fork may have left in the other process.
        if LOGGER_SET.swap(true, Ordering::Relaxed) || log::set_logger(&HostLogger).is_err() {
            return;
        }
        let level = environment_level();
        log::set_max_level(level.unwrap_or(DEFAULT_LEVEL));
        if level.is_none() {
            log::warn!(
                "KVFERRY_LOG={:?} is no level; expected off, error, warn, info, debug or trace; using warn",
                env::var_os("KVFERRY_LOG").unwrap_or_default()
            );
        }
    });
}

const DEFAULT_LEVEL: LevelFilter = LevelFilter::Warn;

/// The level of lines on standard error; none if the variable names no level.
fn environment_level() -> Option<LevelFilter> {
    match env::var("KVFERRY_LOG") {
        Ok(level) => level.parse().ok(),
        Err(env::VarError::NotPresent) => Some(DEFAULT_LEVEL),
        Err(env::VarError::NotUnicode(_)) => None,
    }
}

/// Sets a callback for log lines up to `max_level` (1 error to 5 trace, 0 none). `user` is passed to each call.
/// Replaces a callback set before: when this returns, that one is not running and is not called any more. Without a
/// callback, lines up to the level that the environment variable KVFERRY_LOG names (off, error, warn, info, debug,
/// trace; default warn) go to standard error.
///
/// # Safety
/// `callback` must be safe to call from any thread, also from several at once, until it is replaced or unset.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_log_set(callback: kvf_log_callback, user: *mut c_void, max_level: u32) -> i32 {
    boundary!(kvf_log_set, {
        let call = callback.ok_or_else(|| Error::invalid("callback is NULL; use kvf_log_unset to remove one"))?;
        let level = match max_level {
            0 => LevelFilter::Off,
            level => Level::iter()
                .find(|candidate| *candidate as u32 == level)
                .map(|level| level.to_level_filter())
                .ok_or_else(|| Error::invalid(format!("max_level is {max_level}, expected 0 (none) to 5 (trace)")))?,
        };
        start();
        *LINES.get().sink.write().unwrap_or_else(PoisonError::into_inner) = Some(LogCallback { call, user });
        log::set_max_level(level);
        Ok(())
    })
}

/// Removes the callback. When this returns, it is not running and is not called any more. Lines go to standard error
/// as KVFERRY_LOG says, as before kvf_log_set.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_log_unset() -> i32 {
    boundary!(kvf_log_unset, {
        *LINES.get().sink.write().unwrap_or_else(PoisonError::into_inner) = None;
        log::set_max_level(environment_level().unwrap_or(DEFAULT_LEVEL));
        Ok(())
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::ffi::CStr;
    use std::sync::Mutex;

    use super::*;
    use crate::error::ErrorKind;

    type Lines = Mutex<Vec<(u32, String, String, i32)>>;

    unsafe extern "C-unwind" fn note(level: u32, target: *const c_char, message: *const c_char, user: *mut c_void) {
        log::error!(target: "ffi_test", "from inside");
        let refused = kvf_log_unset();
        // SAFETY: the strings are live during the call, and `user` is the test's `Lines`, which outlives the callback.
        unsafe {
            let text = |text| CStr::from_ptr(text).to_str().unwrap().to_owned();
            let line = (level, text(target), text(message), refused);
            (*user.cast::<Lines>()).lock().unwrap().push(line);
        }
    }

    #[test]
    fn lines_go_to_the_callback_until_it_is_unset() {
        let lines = Lines::default();
        let user = (&raw const lines).cast_mut().cast();
        // SAFETY: `note` may be called from any thread, and `lines` lives until it is unset.
        unsafe {
            assert_eq!(kvf_log_set(None, user, 3), ErrorKind::InvalidArgument.code());
            assert_eq!(kvf_log_set(Some(note), user, 6), ErrorKind::InvalidArgument.code());
            assert_eq!(kvf_log_set(Some(note), user, 3), 0);
        }
        log::info!(target: "ffi_test", "one\0two");
        log::debug!(target: "ffi_test", "too detailed");
        std::thread::spawn(|| log::error!(target: "ffi_test", "from a thread")).join().unwrap();
        assert_eq!(kvf_log_unset(), 0);
        log::error!(target: "ffi_test", "to standard error");
        let lines = lines.into_inner().unwrap();
        let refused = ErrorKind::InvalidArgument.code();
        let ours: Vec<_> = lines.into_iter().filter(|line| line.1 == "ffi_test").collect();
        assert_eq!(
            ours,
            [
                (3, "ffi_test".to_owned(), "one?two".to_owned(), refused),
                (1, "ffi_test".to_owned(), "from a thread".to_owned(), refused),
            ]
        );
    }
}
