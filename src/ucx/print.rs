//! Texts that UCX only prints.

use std::ffi::{CStr, c_char};
use std::ptr;

/// Returns the text that `print` writes to a C stream; empty when the system has no memory for one.
pub(super) fn printed(print: impl FnOnce(*mut libc::FILE)) -> String {
    let (mut text, mut length) = (ptr::null_mut::<c_char>(), 0usize);
    // SAFETY: both out-parameters live until fclose below.
    let stream = unsafe { libc::open_memstream(&mut text, &mut length) };
    if stream.is_null() {
        return String::new();
    }
    print(stream);
    // SAFETY: the stream is open and not used again; closing makes `text` and `length` final.
    unsafe { libc::fclose(stream) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: open_memstream's buffer holds `length` bytes and a NUL.
    let copied = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: the buffer came from malloc inside open_memstream and is not used again.
    unsafe { libc::free(text.cast()) };
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_comes_back() {
        // SAFETY: the stream is open, and the format names no argument.
        let text = printed(|stream| unsafe {
            libc::fprintf(stream, c"two\nlines".as_ptr());
        });
        assert_eq!(text, "two\nlines");
        assert_eq!(printed(|_| ()), "");
    }
}
