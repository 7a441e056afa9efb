//! The pre-shared key and its file.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::error::{Error, ErrorKind, Result};

/// Length of a key in bytes.
pub const KEY_BYTES: usize = 32;

/// Names a key file where the configuration names none.
pub const ENV: &str = "KVFERRY_KEY_FILE";

/// A key takes 64 characters as hexadecimal digits; with white space around them, far less than this.
const MAX_FILE_BYTES: u64 = 1024;

/// A pre-shared key. Cheap to clone; the bytes are overwritten when the last clone is dropped, and are in no log and no
/// `Debug` text.
#[derive(Clone)]
pub struct Key(Arc<Zeroizing<[u8; KEY_BYTES]>>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// A key from its bytes, which must be drawn at random.
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Key {
        Key(Arc::new(Zeroizing::new(bytes)))
    }

    /// The key that a configuration asks for. That of `key_file`; none if it is the empty path; without a `key_file`
    /// that of the file which the environment variable [`ENV`] names, if it is set and not empty.
    ///
    /// # Errors
    /// As [`Key::load`].
    pub fn configured(key_file: Option<&Path>) -> Result<Option<Key>> {
        let from_environment = std::env::var_os(ENV);
        let (path, origin) = match key_file {
            Some(path) => (path, "key_file"),
            None => (Path::new(from_environment.as_deref().unwrap_or_default()), ENV),
        };
        if path.as_os_str().is_empty() {
            return Ok(None);
        }
        Key::load(path).map(Some).map_err(|e| e.context(origin))
    }

    /// Reads a key file. It has 64 hexadecimal digits, or 32 bytes in base64; white space around them is let pass.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] for a file that can't be read, [`ErrorKind::InvalidArgument`] for one with other contents, or
    /// one that others than its owner may read or write. No text has anything of the contents.
    pub fn load(path: &Path) -> Result<Key> {
        let at = path.display();
        let io = |e: std::io::Error| {
            Error::new(
                ErrorKind::Io,
                format!("the key file {at} cannot be read: {e}; `kvferry key {at}` makes a new one"),
            )
        };
        // Without waiting, in case it is a pipe.
        let file =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(Error::invalid(format!("the key file {at} is not a regular file")));
        }
        let mode = metadata.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(Error::invalid(format!(
                "the key file {at} has mode {mode:04o}: others than its owner may use it; make it 0600 (chmod 600 {at})"
            )));
        }
        let mut text = Zeroizing::new(Vec::with_capacity(MAX_FILE_BYTES as usize + 1));
        file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text).map_err(io)?;
        match decode(text.trim_ascii()) {
            Some(bytes) => Ok(Key(Arc::new(bytes))),
            None => Err(Error::invalid(format!(
                "the key file {at} holds {} characters that are not a key: expected 64 hexadecimal digits, or 32 bytes \
                 in base64 (44 characters); `kvferry key PATH` makes a new one",
                text.trim_ascii().len()
            ))),
        }
    }

    pub(super) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

fn decode(text: &[u8]) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
    match text.len() {
        64 => decode_digits(text, 4, hex_digit),
        44 => decode_digits(text.strip_suffix(b"=")?, 6, base64_digit),
        43 => decode_digits(text, 6, base64_digit),
        _ => None,
    }
}

/// Digits of `bits` bits each, most significant first; what is left over at the end must be zero.
fn decode_digits(text: &[u8], bits: u32, digit: impl Fn(u8) -> Option<u8>) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    let mut out = bytes.iter_mut();
    let (mut held, mut count) = (0u32, 0u32);
    for &character in text {
        held = (held << bits) | u32::from(digit(character)?);
        count += bits;
        if count >= 8 {
            count -= 8;
            *out.next()? = (held >> count) as u8;
            held &= (1 << count) - 1;
        }
    }
    (out.next().is_none() && held == 0).then_some(bytes)
}

fn hex_digit(character: u8) -> Option<u8> {
    char::from(character).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

fn base64_digit(character: u8) -> Option<u8> {
    match character {
        b'A'..=b'Z' => Some(character - b'A'),
        b'a'..=b'z' => Some(character - b'a' + 26),
        b'0'..=b'9' => Some(character - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::*;

    const BYTES: [u8; 32] = [
        0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff, 0xfb, 0xff,
        0xbf, 0x3e, 0x3f, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b,
    ];
    const HEX: &str = "00112233445566778899aAbBcCdDeEfFfbffbf3e3f0102030405060708090a0b";
    const BASE64: &str = "ABEiM0RVZneImaq7zN3u//v/vz4/AQIDBAUGBwgJCgs=";

    fn file(name: &str, contents: &[u8], mode: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kvf-key-{}-{name}", std::process::id()));
        fs::write(&path, contents).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn both_spellings_give_the_same_key() {
        for (name, text) in [
            ("hex", HEX.to_owned()),
            ("base64", BASE64.to_owned()),
            ("unpadded", BASE64.trim_end_matches('=').to_owned()),
            ("space", format!("\n  {HEX}\t\r\n")),
        ] {
            let path = file(name, text.as_bytes(), 0o600);
            assert_eq!(Key::load(&path).unwrap().bytes(), &BYTES, "{name}");
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_without_its_contents() {
        let secret = "c0ffee";
        for (name, text) in [
            ("empty", String::new()),
            ("short", secret.to_owned()),
            ("63", HEX.get(1..).unwrap().to_owned()),
            ("65", format!("{HEX}0")),
            ("letters", format!("{secret}{}", "z".repeat(58))),
            ("long", secret.repeat(1000)),
            ("not-base64", format!("{}!{secret}", "A".repeat(37))),
            ("two", format!("{HEX}\n{HEX}\n")),
        ] {
            let path = file(name, text.as_bytes(), 0o600);
            let error = Key::load(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name}");
            assert!(error.message().contains("64 hexadecimal digits"), "{error}");
            assert!(!error.message().contains(secret), "{error}");
            fs::remove_file(path).unwrap();
        }
        let none = Key::load(Path::new("/no/such/key")).unwrap_err();
        assert_eq!(none.kind(), ErrorKind::Io);
        assert!(none.message().contains("/no/such/key"), "{none}");
        assert!(Key::load(Path::new("/dev/zero")).unwrap_err().message().contains("not a regular file"));
    }

    #[test]
    fn a_file_that_others_may_use_is_refused() {
        for mode in [0o640, 0o604, 0o620, 0o601, 0o666] {
            let path = file(&format!("mode{mode:o}"), HEX.as_bytes(), mode);
            let error = Key::load(&path).unwrap_err();
            assert!(error.message().contains("chmod 600"), "{error}");
            fs::remove_file(path).unwrap();
        }
        let path = file("mode400", HEX.as_bytes(), 0o400);
        assert_eq!(Key::load(&path).unwrap().bytes(), &BYTES);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_configuration_names_a_key_or_none() {
        let path = file("configured", HEX.as_bytes(), 0o600);
        assert_eq!(Key::configured(Some(&path)).unwrap().unwrap().bytes(), &BYTES);
        fs::remove_file(&path).unwrap();
        assert!(Key::configured(Some(&path)).unwrap_err().message().starts_with("key_file: "));
        assert!(Key::configured(Some(Path::new(""))).unwrap().is_none());
    }

    #[test]
    fn no_text_has_the_key() {
        let text = format!("{:?}", Key::from_bytes(BYTES));
        assert_eq!(text, "Key(..)");
    }
}
