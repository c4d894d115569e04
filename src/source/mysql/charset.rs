//! From the character sets of columns to UTF-8.
//!
//! The log names a collation by number, and every collation belongs to one character set. The numbers are those of
//! MySQL 9.7 and MariaDB 11.4, which agree where both have one: MariaDB's NOPAD collations are the older ones plus
//! 1024, and its UCA 14 collations begin at 2048 with 256 numbers for each Unicode encoding.

use encoding_rs::{DecoderResult, Encoding};

use super::charset_patches::{self as patches, Patches};
use super::input::big_endian;

/// How the bytes of a string are to be read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Charset {
    Binary,
    /// utf8mb4, utf8mb3 and ascii: the bytes can stay as they are.
    Utf8,
    Utf32,
    /// ISO 8859-9; the encoding of that name on the web is another one.
    Latin5,
    Tis620,
    Encoded(&'static Encoding),
    /// An encoding of the web, but for some characters.
    Differing(&'static Encoding, Width, Patches),
}

/// How many bytes a character has, as its first one tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    One,
    Chinese,
    ShiftJis,
    EucJp,
}

impl Width {
    fn of(self, first: u8) -> usize {
        match (self, first) {
            (Width::Chinese, 0x81..) => 2,
            (Width::ShiftJis, 0x81..=0x9f | 0xe0..=0xfc) => 2,
            (Width::EucJp, 0x8f) => 3,
            (Width::EucJp, 0x8e | 0xa1..=0xfe) => 2,
            _ => 1,
        }
    }

    /// The user's own characters of EUC-JP, which the web does not have.
    fn private(self, character: &[u8]) -> Option<char> {
        match (self, character) {
            (Width::EucJp, &[row @ 0xf5..=0xfe, cell @ 0xa1..=0xfe]) => {
                char::from_u32(0xe000 + u32::from(row - 0xf5) * 94 + u32::from(cell - 0xa1))
            }
            _ => None,
        }
    }
}

/// Bytes that are no text in their character set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotText;

/// `None` for a collation that is unknown, or whose character set nothing here can read: dec8, cp850, cp852, hp8, swe7,
/// armscii8, keybcs2, macce, geostd8.
pub fn of_collation(collation: u16) -> Option<Charset> {
    use encoding_rs as e;
    let encoding = match collation {
        1025..=1270 => return of_collation(collation - 1024),
        2048..=2559 => return Some(Charset::Utf8),
        2560..=3071 => e::UTF_16BE,
        3072..=3327 => return Some(Charset::Utf32),
        63 => return Some(Charset::Binary),
        11 | 65 => return Some(Charset::Utf8),
        33 | 76 | 83 | 192..=223 | 576..=578 => return Some(Charset::Utf8),
        45 | 46 | 224..=247 | 255..=323 | 608..=610 => return Some(Charset::Utf8),
        // MySQL's latin1 is Windows-1252.
        5 | 8 | 15 | 31 | 47..=49 | 94 => e::WINDOWS_1252,
        1 | 84 => return Some(Charset::Differing(e::BIG5, Width::Chinese, patches::BIG5)),
        2 | 9 | 21 | 27 | 77 => e::ISO_8859_2,
        7 | 74 => e::KOI8_R,
        12 | 91 => return Some(Charset::Differing(e::EUC_JP, Width::EucJp, patches::UJIS)),
        97 | 98 => return Some(Charset::Differing(e::EUC_JP, Width::EucJp, &[])),
        13 | 88 => return Some(Charset::Differing(e::SHIFT_JIS, Width::ShiftJis, patches::SJIS)),
        95 | 96 => e::SHIFT_JIS,
        14 | 23 | 50..=52 => e::WINDOWS_1251,
        16 | 71 => return Some(Charset::Differing(e::ISO_8859_8, Width::One, patches::HEBREW)),
        18 | 89 => return Some(Charset::Tis620),
        19 | 85 => e::EUC_KR,
        20 | 41 | 42 | 79 => e::ISO_8859_13,
        22 | 75 => return Some(Charset::Differing(e::KOI8_U, Width::One, patches::KOI8U)),
        24 | 86 => return Some(Charset::Differing(e::GBK, Width::Chinese, patches::GB2312)),
        28 | 87 => e::GBK,
        25 | 70 => return Some(Charset::Differing(e::ISO_8859_7, Width::One, patches::GREEK)),
        26 | 34 | 44 | 66 | 99 => e::WINDOWS_1250,
        29 | 58 | 59 => e::WINDOWS_1257,
        30 | 78 => return Some(Charset::Latin5),
        35 | 90 | 128..=159 | 640..=642 => e::UTF_16BE,
        36 | 68 => return Some(Charset::Differing(e::IBM866, Width::One, patches::CP866)),
        39 | 53 => e::MACINTOSH,
        54 | 55 | 101..=124 | 672..=674 => e::UTF_16BE,
        56 | 62 => e::UTF_16LE,
        57 | 67 => e::WINDOWS_1256,
        60 | 61 | 160..=183 | 736..=738 => return Some(Charset::Utf32),
        248..=250 => e::GB18030,
        _ => return None,
    };
    Some(Charset::Encoded(encoding))
}

/// A collation of the character set of this name, for columns of which only the catalog tells
/// (`information_schema.columns.character_set_name`; a binary column has none, and the collation 63).
pub fn collation_of(charset: &str) -> Option<u16> {
    const COLLATIONS: [(&str, u16); 42] = [
        ("armscii8", 32),
        ("ascii", 11),
        ("big5", 1),
        ("binary", 63),
        ("cp1250", 26),
        ("cp1251", 51),
        ("cp1256", 57),
        ("cp1257", 59),
        ("cp850", 4),
        ("cp852", 40),
        ("cp866", 36),
        ("cp932", 95),
        ("dec8", 3),
        ("eucjpms", 97),
        ("euckr", 19),
        ("gb18030", 248),
        ("gb2312", 24),
        ("gbk", 28),
        ("geostd8", 92),
        ("greek", 25),
        ("hebrew", 16),
        ("hp8", 6),
        ("keybcs2", 37),
        ("koi8r", 7),
        ("koi8u", 22),
        ("latin1", 8),
        ("latin2", 9),
        ("latin5", 30),
        ("latin7", 41),
        ("macce", 38),
        ("macroman", 39),
        ("sjis", 13),
        ("swe7", 10),
        ("tis620", 18),
        ("ucs2", 35),
        ("ujis", 12),
        ("utf16", 54),
        ("utf16le", 56),
        ("utf32", 60),
        ("utf8", 33),
        ("utf8mb3", 33),
        ("utf8mb4", 45),
    ];
    COLLATIONS.iter().find(|(name, _)| charset.eq_ignore_ascii_case(name)).map(|(_, collation)| *collation)
}

/// Appends the text as UTF-8.
pub fn to_utf8(charset: Charset, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), NotText> {
    let mut push = |character: char| out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
    match charset {
        Charset::Binary | Charset::Utf8 => out.extend_from_slice(bytes),
        Charset::Utf32 => {
            let (characters, left) = bytes.as_chunks::<4>();
            for character in characters {
                push(char::from_u32(u32::from_be_bytes(*character)).ok_or(NotText)?);
            }
            if !left.is_empty() {
                return Err(NotText);
            }
        }
        Charset::Latin5 => {
            for &byte in bytes {
                push(match byte {
                    0xd0 => 'Ğ',
                    0xdd => 'İ',
                    0xde => 'Ş',
                    0xf0 => 'ğ',
                    0xfd => 'ı',
                    0xfe => 'ş',
                    latin1 => char::from(latin1),
                });
            }
        }
        Charset::Tis620 => {
            for &byte in bytes {
                push(match byte {
                    ..=0x9f => char::from(byte),
                    0xa1..=0xda | 0xdf..=0xfb => char::from_u32(0x0e00 + u32::from(byte - 0xa0)).ok_or(NotText)?,
                    _ => return Err(NotText),
                });
            }
        }
        Charset::Encoded(encoding) => decode(encoding, bytes, out)?,
        Charset::Differing(encoding, width, patches) => {
            let (mut plain, mut at) = (0, 0);
            while let Some(&first) = bytes.get(at) {
                let len = width.of(first);
                let character = bytes.get(at..at + len).ok_or(NotText)?;
                let patch = width.private(character).or_else(|| {
                    let number = if len > 2 { return None } else { big_endian(character) as u16 };
                    patches.binary_search_by_key(&number, |(number, _)| *number).ok().map(|found| patches[found].1)
                });
                if let Some(patch) = patch {
                    decode(encoding, &bytes[plain..at], out)?;
                    out.extend_from_slice(patch.encode_utf8(&mut [0; 4]).as_bytes());
                    plain = at + len;
                }
                at += len;
            }
            decode(encoding, &bytes[plain..], out)?;
        }
    }
    Ok(())
}

fn decode(encoding: &'static Encoding, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), NotText> {
    let mut decoder = encoding.new_decoder_without_bom_handling();
    let room = decoder.max_utf8_buffer_length_without_replacement(bytes.len()).ok_or(NotText)?;
    let start = out.len();
    out.resize(start + room, 0);
    let (result, _, written) = decoder.decode_to_utf8_without_replacement(bytes, &mut out[start..], true);
    out.truncate(start + written);
    if result == DecoderResult::InputEmpty { Ok(()) } else { Err(NotText) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(collation: u16, bytes: &[u8]) -> Option<String> {
        let mut out = Vec::new();
        to_utf8(of_collation(collation)?, bytes, &mut out).ok()?;
        String::from_utf8(out).ok()
    }

    #[test]
    fn text_of_every_family_becomes_utf8() {
        assert_eq!(text(8, b"gr\xfc\xdfe \x80").as_deref(), Some("grüße €"));
        assert_eq!(text(28, b"\xc4\xe3\xba\xc3").as_deref(), Some("你好"));
        assert_eq!(text(30, b"\xde\xfd").as_deref(), Some("Şı"));
        assert_eq!(text(54, b"\x00a\xd8\x3d\xde\x00").as_deref(), Some("a😀"));
        assert_eq!(text(62, b"a\x00").as_deref(), Some("a"));
        assert_eq!(text(60, b"\x00\x01\xf6\x00").as_deref(), Some("😀"));
        assert_eq!(text(1032, b"\xfc").as_deref(), Some("ü"));
        assert_eq!(text(2304, "ü".as_bytes()).as_deref(), Some("ü"));
        // Where the web has other characters.
        assert_eq!(text(13, b"\x81\x60\\a\x93\xfa").as_deref(), Some("〜\\a日"));
        assert_eq!(text(12, b"\xa1\xc1\xf5\xa1\x8f\xb0\xa1\xc6\xfc").as_deref(), Some("〜\u{e000}丂日"));
        assert_eq!(text(1, b"\xc6\xa1\xa7\x41").as_deref(), Some("ヾ你"));
        assert_eq!(text(36, b"a\xfdb").as_deref(), Some("a²b"));
        assert_eq!(text(18, b"a\xa1").as_deref(), Some("aก"));
        assert_eq!(text(18, b"\xdb"), None);
        assert_eq!(text(60, b"\x00\x01\xf6"), None);
        assert_eq!(text(28, b"\xc4"), None);
        assert_eq!(text(4, b"a"), None);
        assert_eq!(text(9999, b"a"), None);
        assert_eq!(collation_of("GBK").and_then(|collation| text(collation, b"\xc4\xe3")).as_deref(), Some("你"));
        assert_eq!(collation_of("cp850").and_then(of_collation), None);
        assert_eq!(collation_of("klingon"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics_and_stays_utf8(collation: u16, bytes: Vec<u8>) {
            let Some(charset) = of_collation(collation % 3400) else { return Ok(()) };
            let mut out = Vec::new();
            if to_utf8(charset, &bytes, &mut out).is_ok() && !matches!(charset, Charset::Binary | Charset::Utf8) {
                prop_assert!(std::str::from_utf8(&out).is_ok());
            }
        }
    }
}
