//! Decimals and floats, printed as the server prints them.
//!
//! A DECIMAL(p, s) is stored in groups of nine digits of four bytes each, counted from the point to both sides, with
//! shorter groups at the ends; the first bit is inverted, and a negative number has all its bits inverted, so that
//! the bytes sort.

use std::io::Write as _;

/// Bytes of a group of so many digits.
const GROUP_BYTES: [u8; 10] = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4];
/// A column has at most 65 digits; a decimal in JSON counts the digits of its groups, of which there are nine.
const MAX_PRECISION: u8 = 81;
const MAX_SCALE: u8 = 30;

/// Bytes of a DECIMAL; `None` for one that cannot be.
pub fn decimal_size(precision: u8, scale: u8) -> Option<u8> {
    if precision == 0 || precision > MAX_PRECISION || scale > MAX_SCALE.min(precision) {
        return None;
    }
    let part = |digits: u8| digits / 9 * 4 + GROUP_BYTES[usize::from(digits % 9)];
    Some(part(precision - scale) + part(scale))
}

/// `None` if the bytes are no such decimal.
pub fn write_decimal(precision: u8, scale: u8, raw: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let size = usize::from(decimal_size(precision, scale)?);
    // 81 digits take at most 38 bytes.
    let mut stored = [0u8; 40];
    let bytes = stored.get_mut(..size).filter(|_| raw.len() == size)?;
    bytes.copy_from_slice(raw);
    bytes[0] ^= 0x80;
    let negative = raw[0] & 0x80 == 0;
    if negative {
        bytes.iter_mut().for_each(|byte| *byte = !*byte);
    }
    let mut rest = &*bytes;
    let mut group = |digits: u8| {
        let (head, tail) = rest.split_at_checked(usize::from(GROUP_BYTES[usize::from(digits)]))?;
        rest = tail;
        let number = super::input::big_endian(head);
        (number < 10u64.pow(u32::from(digits))).then_some(number)
    };
    if negative {
        out.push(b'-');
    }
    let whole = precision - scale;
    let mut leading = true;
    let head = (!whole.is_multiple_of(9)).then_some(whole % 9);
    for digits in head.into_iter().chain(std::iter::repeat_n(9, usize::from(whole / 9))) {
        let number = group(digits)?;
        // Writing to a Vec cannot fail.
        if !leading {
            let _ = write!(out, "{number:09}");
        } else if number != 0 {
            let _ = write!(out, "{number}");
            leading = false;
        }
    }
    if leading {
        out.push(b'0');
    }
    if scale > 0 {
        out.push(b'.');
        let tail = (!scale.is_multiple_of(9)).then_some(scale % 9);
        for digits in std::iter::repeat_n(9, usize::from(scale / 9)).chain(tail) {
            let (number, width) = (group(digits)?, usize::from(digits));
            let _ = write!(out, "{number:0width$}");
        }
    }
    Some(())
}

/// The shortest digits that read back as the same number, in the server's choice of notation. `None` for infinity and
/// NaN, which no column holds.
pub fn write_double(number: f64, out: &mut Vec<u8>) -> Option<()> {
    write_float_digits(number, None, out)
}

/// The server prints a FLOAT with six digits at most.
pub fn write_float(number: f32, out: &mut Vec<u8>) -> Option<()> {
    write_float_digits(f64::from(number), Some(5), out)
}

fn write_float_digits(number: f64, fraction_digits: Option<usize>, out: &mut Vec<u8>) -> Option<()> {
    /// Beyond this many digits before the point, or zeros after it, the server writes an exponent.
    const PLAIN_DIGITS: i32 = 15;
    if !number.is_finite() {
        return None;
    }
    let mut digits = Digits::default();
    match fraction_digits {
        Some(count) => digits.round(number, count)?,
        None => digits.shortest(number)?,
    }
    let (len, exponent) = (digits.len, digits.exponent);
    let digits = &digits.bytes[..len];
    if number.is_sign_negative() {
        out.push(b'-');
    }
    // Where the point stands, counted from the first digit.
    let point = exponent + 1;
    let plain = point > -PLAIN_DIGITS && (point <= PLAIN_DIGITS || len as i32 > point);
    if plain {
        match usize::try_from(point) {
            Ok(point) if point > 0 => {
                let (whole, fraction) = digits.split_at(point.min(len));
                out.extend_from_slice(whole);
                out.resize(out.len() + point.saturating_sub(len), b'0');
                if !fraction.is_empty() {
                    out.push(b'.');
                    out.extend_from_slice(fraction);
                }
            }
            _ => {
                out.extend_from_slice(b"0.");
                out.resize(out.len() + point.unsigned_abs() as usize, b'0');
                out.extend_from_slice(digits);
            }
        }
    } else {
        out.push(digits[0]);
        if len > 1 {
            out.push(b'.');
            out.extend_from_slice(&digits[1..]);
        }
        let _ = write!(out, "e{exponent}");
    }
    Some(())
}

/// The digits of a positive number, the point being after the first.
#[derive(Clone, Copy, Default)]
struct Digits {
    bytes: [u8; 20],
    len: usize,
    exponent: i32,
}

impl Digits {
    /// Of two shortest strings that are equally near, the server takes the one whose last digit is even, as rounding
    /// to that many digits does, and formatting does not. At a power of two the rounded one may be another number.
    fn shortest(&mut self, number: f64) -> Option<()> {
        let mut scratch = [0u8; 40];
        self.parse(print(&mut scratch, format_args!("{:e}", number.abs()))?)?;
        let count = self.len - 1;
        let rounded = print(&mut scratch, format_args!("{:.count$e}", number.abs()))?;
        if rounded.parse() == Ok(number.abs()) {
            self.parse(rounded)?;
        }
        Some(())
    }

    fn round(&mut self, number: f64, fraction_digits: usize) -> Option<()> {
        self.parse(print(&mut [0u8; 40], format_args!("{:.fraction_digits$e}", number.abs()))?)
    }

    fn parse(&mut self, text: &str) -> Option<()> {
        let (mantissa, exponent) = text.split_once('e')?;
        self.exponent = exponent.parse().ok()?;
        self.len = 0;
        for byte in mantissa.bytes().filter(u8::is_ascii_digit) {
            *self.bytes.get_mut(self.len)? = byte;
            self.len += 1;
        }
        while self.len > 1 && self.bytes[self.len - 1] == b'0' {
            self.len -= 1;
        }
        (self.len > 0).then_some(())
    }
}

/// Formats without allocating.
fn print<'a>(scratch: &'a mut [u8; 40], text: std::fmt::Arguments<'_>) -> Option<&'a str> {
    let mut cursor = scratch.as_mut_slice();
    cursor.write_fmt(text).ok()?;
    let written = 40 - cursor.len();
    std::str::from_utf8(&scratch[..written]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn double(number: f64) -> String {
        let mut out = Vec::new();
        write_double(number, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn doubles_read_as_the_server_prints_them() {
        for (number, expected) in [
            (0.0, "0"),
            (-0.0, "-0"),
            (0.1, "0.1"),
            (1e100, "1e100"),
            (1.5e-7, "0.00000015"),
            (1e14, "100000000000000"),
            (1e15, "1e15"),
            (123456789012345680.0, "1.2345678901234568e17"),
            (1e-15, "0.000000000000001"),
            (1e-16, "1e-16"),
            (-1.25e-300, "-1.25e-300"),
            (f64::MAX, "1.7976931348623157e308"),
            (87_085_278_813_506.63, "87085278813506.62"),
            (9007199254740993.0, "9.007199254740992e15"),
            (f64::from_bits(1), "5e-324"),
        ] {
            assert_eq!(double(number), expected);
        }
    }

    #[test]
    fn decimals_read_as_the_server_prints_them() {
        let text = |precision, scale, raw: &[u8]| {
            let mut out = Vec::new();
            write_decimal(precision, scale, raw, &mut out).map(|()| String::from_utf8(out).unwrap())
        };
        // The example of the server's own source: 1234567890.1234 as DECIMAL(14,4).
        assert_eq!(text(14, 4, b"\x81\x0d\xfb\x38\xd2\x04\xd2").as_deref(), Some("1234567890.1234"));
        assert_eq!(text(14, 4, b"\x7e\xf2\x04\xc7\x2d\xfb\x2d").as_deref(), Some("-1234567890.1234"));
        assert_eq!(text(2, 2, b"\x85").as_deref(), Some("0.05"));
        assert_eq!(text(2, 2, b"\xff"), None);
        assert_eq!(text(2, 2, b"\x85\0"), None);
        assert_eq!(decimal_size(82, 0), None);
        assert_eq!(decimal_size(10, 11), None);
    }

    proptest! {
        #[test]
        fn arbitrary_decimals_never_panic(precision: u8, scale: u8, raw: Vec<u8>) {
            let _ = write_decimal(precision % 90, scale % 35, &raw, &mut Vec::new());
            if let Some(size) = decimal_size(precision % 90, scale % 35) {
                let mut raw = raw;
                raw.resize(usize::from(size), 0);
                let _ = write_decimal(precision % 90, scale % 35, &raw, &mut Vec::new());
            }
        }

        #[test]
        fn a_printed_double_reads_back(number in any::<f64>().prop_filter("finite", |number| number.is_finite())) {
            prop_assert_eq!(double(number).parse::<f64>(), Ok(number));
        }
    }
}
