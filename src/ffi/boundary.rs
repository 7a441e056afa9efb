//! The frame of every export: panics are caught, arguments are checked, and errors are kept for the caller.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, ErrorKind, Result};

thread_local! {
    /// The text of the last failed call of this thread.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
    /// True if this thread is in a callback of the host's.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// True if the calling thread is in a callback of the host's.
pub(super) fn is_in_callback() -> bool {
    IN_CALLBACK.try_with(Cell::get).unwrap_or(false)
}

/// Calls the host's log callback. Until it returns, exports called on this thread are refused: it may be the thread that
/// would have to answer them, or hold what they need.
pub(super) fn call_back(callback: impl FnOnce()) {
    /// Dropped when the callback is left by unwinding, which a C++ exception does, past locks that would stay held.
    struct Returns;
    impl Drop for Returns {
        fn drop(&mut self) {
            let line = "kvferry ERROR: the log callback did not return: it may throw no exception and end no thread; ending the \
                        process\n";
            let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
            std::process::abort();
        }
    }
    let _ = IN_CALLBACK.try_with(|inside| inside.set(true));
    let returns = Returns;
    callback();
    std::mem::forget(returns);
    let _ = IN_CALLBACK.try_with(|inside| inside.set(false));
}

/// Wraps the body of an export: `boundary!(kvf_noun_verb, { body })`, where the body is a `Result<()>`. Gives 0 or a
/// negative code, and keeps the error's text, with the function's name before it, for `kvf_last_error`.
macro_rules! boundary {
    ($name:ident, $body:block) => {
        $crate::ffi::boundary::run(stringify!($name), || -> $crate::error::Result<()> { $body })
    };
}

/// The function behind [`boundary!`].
pub(super) fn run(name: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    // A body that panicked half-way is not entered again with what it borrowed: everything shared is behind locks
    // that tolerate poisoning, or is only written when a call succeeds.
    let error = match catch_unwind(AssertUnwindSafe(|| not_in_callback().and_then(|()| body()))) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(payload) => Error::new(
            ErrorKind::Internal,
            format!("a bug in kvferry, please report it with this text: {}", panic_text(payload)),
        ),
    };
    let error = error.context(name);
    remember(error.message());
    error.kind().code()
}

fn not_in_callback() -> Result<()> {
    if is_in_callback() {
        return Err(Error::invalid(
            "called from the log callback, whose thread may be the one that has to answer; call it from another thread",
        ));
    }
    Ok(())
}

fn panic_text(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<&str>() {
        Ok(text) => return (*text).to_owned(),
        Err(payload) => payload,
    };
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => {
            // It may panic again when it is dropped, outside of the catch.
            std::mem::forget(payload);
            "a panic without a text".to_owned()
        }
    }
}

fn remember(text: &str) {
    // A thread that is ending has lost the place already; the status still tells the kind.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            last.clear();
            // A C string ends at a NUL; none of ours has one unless a caller's text brought it along.
            last.extend(text.chars().map(|c| if c == '\0' { '?' } else { c }));
        }
    });
}

/// Gives the last error's text to `with`.
pub(super) fn with_last_error<R>(with: impl FnOnce(&str) -> R) -> Option<R> {
    LAST.try_with(|last| last.try_borrow().ok().map(|last| with(&last))).ok().flatten()
}

/// Where a result goes. Made from an out-parameter, written only on success.
pub(super) struct Out<T> {
    pointer: *mut T,
}

impl<T> Out<T> {
    /// Checks the out-parameter `name`.
    ///
    /// # Safety
    /// A pointer that is not null and aligned must be valid for a write of a `T` until the export returns.
    pub(super) unsafe fn new(pointer: *mut T, name: &str) -> Result<Self> {
        check(pointer, 1, name)?;
        Ok(Out { pointer })
    }

    /// Writes the result.
    pub(super) fn write(self, value: T) {
        // SAFETY: `new` was promised that the pointer is valid for this write, and checked that it is aligned.
        unsafe { self.pointer.write(value) }
    }
}

/// The `len` elements at `pointer`, which may be null when `len` is 0.
///
/// # Safety
/// A pointer that is not null and aligned must be valid for reads of `len` elements for `'a`, and nothing may write to
/// them meanwhile.
pub(super) unsafe fn slice<'a, T>(pointer: *const T, len: usize, name: &str) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    check(pointer, len, name)?;
    // SAFETY: not null, aligned and not over the address space by `check`; valid by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// Like [`slice()`], for an array that the call writes to.
///
/// # Safety
/// A pointer that is not null and aligned must be valid for reads and writes of `len` elements for `'a`, and nothing
/// else may touch them meanwhile.
pub(super) unsafe fn slice_mut<'a, T>(pointer: *mut T, len: usize, name: &str) -> Result<&'a mut [T]> {
    if len == 0 {
        return Ok(&mut []);
    }
    check(pointer, len, name)?;
    // SAFETY: not null, aligned and not over the address space by `check`; valid by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
}

/// The UTF-8 text of `len` bytes at `pointer`.
///
/// # Safety
/// As for [`slice()`].
pub(super) unsafe fn text<'a>(pointer: *const c_char, len: usize, name: &str) -> Result<&'a str> {
    // SAFETY: this function's contract is that of `slice`.
    let bytes = unsafe { slice(pointer.cast::<u8>(), len, name)? };
    std::str::from_utf8(bytes).map_err(|e| Error::invalid(format!("{name} is not UTF-8: {e}")))
}

fn check<T>(pointer: *const T, len: usize, name: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::invalid(format!("{name} is NULL")));
    }
    if !pointer.is_aligned() {
        return Err(Error::invalid(format!(
            "{name} is not aligned: the address {pointer:p} is no multiple of {}",
            align_of::<T>()
        )));
    }
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    let fits = bytes.is_some_and(|bytes| pointer.addr().checked_add(bytes).is_some());
    if !fits {
        return Err(Error::invalid(format!("{name}: {len} elements do not fit into the address space")));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    fn last() -> String {
        with_last_error(str::to_owned).unwrap()
    }

    #[test]
    fn a_panic_becomes_internal_with_its_text() {
        assert_eq!(run("kvf_test", || panic!("number {}", 7)), ErrorKind::Internal.code());
        assert!(last().starts_with("kvf_test: ") && last().ends_with("number 7"), "{}", last());
        assert_eq!(run("kvf_test", || panic!("plain")), ErrorKind::Internal.code());
        assert!(last().ends_with("plain"), "{}", last());
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        assert_eq!(run("kvf_test", || std::panic::panic_any(Bomb)), ErrorKind::Internal.code());
        assert!(last().ends_with("a panic without a text"), "{}", last());
    }

    #[test]
    fn an_error_keeps_its_kind_and_text_and_success_keeps_the_last_text() {
        assert_eq!(boundary!(kvf_test, { Err(Error::not_found("nothing\0there")) }), ErrorKind::NotFound.code());
        assert_eq!(last(), "kvf_test: nothing?there");
        assert_eq!(boundary!(kvf_test, { Ok(()) }), 0);
        assert_eq!(last(), "kvf_test: nothing?there");
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
    }

    #[test]
    fn calls_from_a_callback_are_refused() {
        call_back(|| {
            assert_eq!(run("kvf_test", || panic!("entered")), ErrorKind::InvalidArgument.code());
            assert!(last().starts_with("kvf_test: called from the log callback"), "{}", last());
            std::thread::spawn(|| assert_eq!(run("kvf_test", || Ok(())), 0)).join().unwrap();
        });
        assert_eq!(run("kvf_test", || Ok(())), 0);
    }

    #[test]
    fn pointers_are_checked_before_use() {
        let words = [1u32, 2, 3];
        // SAFETY: null, misaligned and overlong arrays are refused before a read; the last is a live array.
        unsafe {
            assert_eq!(slice::<u32>(std::ptr::null(), 0, "ids").unwrap(), &[] as &[u32]);
            assert_eq!(slice::<u32>(std::ptr::null(), 1, "ids").unwrap_err().message(), "ids is NULL");
            let odd = words.as_ptr().byte_add(1);
            assert!(slice(odd, 1, "ids").unwrap_err().message().starts_with("ids is not aligned"));
            assert!(slice(words.as_ptr(), usize::MAX / 2, "ids").unwrap_err().message().contains("do not fit"));
            assert_eq!(slice(words.as_ptr(), 3, "ids").unwrap(), &words);
            assert_eq!(Out::<u64>::new(std::ptr::null_mut(), "out").err().unwrap().message(), "out is NULL");
            let bytes = [0xffu8, 0xfe];
            assert!(text(bytes.as_ptr().cast(), 2, "host").unwrap_err().message().starts_with("host is not UTF-8"));
        }
    }
}
