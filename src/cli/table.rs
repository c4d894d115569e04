//! Tables for people: columns that line up, and colours on a terminal and nowhere else.
//!
//! What a server said is shown without its control characters, so that no text of others can move the cursor.

use std::io::{IsTerminal as _, stdout};

/// What a text means, where there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tint {
    Plain,
    Heading,
    Good,
    Warning,
    Bad,
    Faint,
}

/// How text may look in the place it goes to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    pub colours: bool,
    /// How many characters fit into a line; `None` where nobody looks.
    pub width: Option<usize>,
}

impl Look {
    pub fn of_stdout() -> Self {
        if !stdout().is_terminal() {
            return Look::default();
        }
        Look { colours: may_colour(), width: terminal_size::terminal_size().map(|(width, _)| usize::from(width.0)) }
    }

    pub fn paint(self, text: &str, tint: Tint) -> String {
        let code = match tint {
            _ if !self.colours || text.is_empty() => return text.to_owned(),
            Tint::Plain => return text.to_owned(),
            Tint::Heading => "1",
            Tint::Good => "32",
            Tint::Warning => "33",
            Tint::Bad => "1;31",
            Tint::Faint => "2",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Whether the user has nothing against colours (<https://no-color.org>), and the terminal can show them.
pub fn may_colour() -> bool {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !no_colour && can_move()
}

/// Whether the terminal can do more than show one line after the other.
pub fn can_move() -> bool {
    std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The text on one line, without whatever a terminal would obey.
pub fn one_line(text: &str) -> String {
    let shown: String = text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
    shown.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    tint: Tint,
}

impl Cell {
    pub fn new(text: impl AsRef<str>, tint: Tint) -> Self {
        Cell { text: one_line(text.as_ref()), tint }
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Cell::new(text, Tint::Plain)
    }
}

/// A column: its heading, and how its cells are laid out.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    heading: &'static str,
    numbers: bool,
    /// It may be cut in the middle where the line is too short.
    gives_way: bool,
}

pub const fn text(heading: &'static str) -> Column {
    Column { heading, numbers: false, gives_way: false }
}

pub const fn number(heading: &'static str) -> Column {
    Column { heading, numbers: true, gives_way: false }
}

pub const fn elastic(heading: &'static str) -> Column {
    Column { heading, numbers: false, gives_way: true }
}

const GAP: &str = "  ";
/// What a cell that gives way keeps.
const LEAST: usize = 12;

pub struct Table {
    columns: &'static [Column],
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub fn new(columns: &'static [Column]) -> Self {
        Table { columns, rows: Vec::new() }
    }

    pub fn add(&mut self, row: impl IntoIterator<Item = Cell>) {
        self.rows.push(row.into_iter().collect());
    }

    /// The table, a line for each row.
    pub fn draw(&self, look: Look) -> String {
        let headings = self.columns.iter().map(|column| Cell::new(column.heading, Tint::Heading)).collect();
        let lines: Vec<&Vec<Cell>> = std::iter::once(&headings).chain(&self.rows).collect();
        let widest = |at: usize| lines.iter().filter_map(|row| row.get(at)).map(|cell| length(&cell.text)).max();
        let mut widths: Vec<usize> = (0..self.columns.len()).map(|at| widest(at).unwrap_or(0)).collect();
        self.give_way(&mut widths, look);
        let mut drawn = String::new();
        for row in lines {
            let mut line = String::new();
            // Blanks are written before what follows them, so that no line ends with some.
            let mut blanks = 0;
            for ((cell, column), width) in row.iter().zip(self.columns).zip(&widths) {
                let text = cut(&cell.text, *width);
                let missing = width - length(&text);
                let (before, after) = if column.numbers { (missing, 0) } else { (0, missing) };
                if !text.is_empty() {
                    line.push_str(&" ".repeat(blanks + before));
                    line.push_str(&look.paint(&text, cell.tint));
                    blanks = 0;
                } else {
                    blanks += before;
                }
                blanks += after + GAP.len();
            }
            drawn.push_str(&line);
            drawn.push('\n');
        }
        drawn
    }

    /// Narrows the columns that may be, until a line fits.
    fn give_way(&self, widths: &mut [usize], look: Look) {
        let Some(fits) = look.width else { return };
        let all = |widths: &[usize]| widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1);
        while all(widths) > fits {
            let wide = |at: &usize| self.columns[*at].gives_way && widths[*at] > LEAST;
            let Some(widest) = (0..widths.len()).filter(wide).max_by_key(|at| widths[*at]) else { return };
            widths[widest] -= 1;
        }
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Both ends of a text that is too long: of a position, the end is what changes.
pub fn cut(text: &str, width: usize) -> String {
    let count = length(text);
    if count <= width || width == 0 {
        return text.to_owned();
    }
    let head = (width - 1) / 2;
    let tail = width - 1 - head;
    text.chars().take(head).chain(['…']).chain(text.chars().skip(count - tail)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 3] = [text("NAME"), elastic("POSITION"), number("LAG")];

    fn table(position: &str) -> Table {
        let mut table = Table::new(&COLUMNS);
        table.add(["orders".into(), position.into(), "7".into()]);
        table.add(["a".into(), "-".into(), Cell::new("1,000", Tint::Bad)]);
        table
    }

    #[test]
    fn columns_line_up_and_no_line_ends_with_blanks() {
        let expected = "NAME    POSITION    LAG\norders  0/16B37       7\na       -         1,000\n";
        assert_eq!(table("0/16B37").draw(Look::default()), expected);
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_in_the_middle_of_what_gives_way() {
        let narrow = Look { colours: false, width: Some(34) };
        let drawn = table("8265A0B1C2D3E4F50000000012B0229296E04").draw(narrow);
        assert!(drawn.lines().all(|line| line.chars().count() <= 34), "{drawn}");
        assert!(drawn.contains("8265A0B1C…") && drawn.contains("6E04"), "{drawn}");
        let whole = table("8265A0B1C2D3E4F50000000012B0229296E04").draw(Look::default());
        assert!(whole.contains("8265A0B1C2D3E4F50000000012B0229296E04"), "{whole}");
    }

    #[test]
    fn colours_are_where_they_are_allowed_and_do_not_shift_columns() {
        let coloured = table("x").draw(Look { colours: true, width: None });
        assert!(coloured.contains("\x1b[1;31m1,000\x1b[0m"), "{coloured:?}");
        let mut plain = coloured;
        for code in ["\x1b[1m", "\x1b[1;31m", "\x1b[0m"] {
            plain = plain.replace(code, "");
        }
        assert_eq!(plain, table("x").draw(Look::default()));
    }

    #[test]
    fn a_text_of_others_never_moves_the_cursor() {
        let mut table = Table::new(&COLUMNS);
        table.add(["a\x1b[2J\nb".into(), "\r".into(), "".into()]);
        let drawn = table.draw(Look { colours: true, width: None });
        assert!(!drawn.contains("\x1b[2J") && !drawn.contains('\r') && drawn.lines().count() == 2, "{drawn:?}");
    }
}
