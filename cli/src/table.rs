//! Tables of text: columns as wide as their widest cell, numbers to the right.

/// Where a column's cells stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows under a heading.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<'a>(columns: impl IntoIterator<Item = (&'a str, Align)>) -> Self {
        Self {
            columns: columns
                .into_iter()
                .map(|(name, align)| (name.to_owned(), align))
                .collect(),
            rows: Vec::new(),
        }
    }

    /// A row; missing cells are empty, further ones are dropped.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells: Vec<String> = cells.into_iter().take(self.columns.len()).collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The lines, without line ends and without spaces at their ends. A column without a filled cell is left out.
    pub(crate) fn lines(&self) -> Vec<String> {
        let shown: Vec<usize> = (0..self.columns.len())
            .filter(|&column| self.rows.iter().any(|row| !row[column].is_empty()))
            .collect();
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let all = || std::iter::once(&heading).chain(&self.rows);
        let width = |column: usize| {
            all()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        all()
            .map(|row| {
                let cells = shown.iter().map(|&column| {
                    let space = " ".repeat(widths[column] - row[column].chars().count());
                    match self.columns[column].1 {
                        Align::Left => format!("{}{space}", row[column]),
                        Align::Right => format!("{space}{}", row[column]),
                    }
                });
                cells
                    .collect::<Vec<String>>()
                    .join("  ")
                    .trim_end()
                    .to_owned()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_empty_ones_left_out() {
        let mut table = Table::new([
            ("worker", Align::Left),
            ("none", Align::Left),
            ("ms", Align::Right),
        ]);
        table.row(["decode-0".into(), String::new(), "3".into()]);
        table.row(["é".into(), String::new(), "1204.5".into()]);
        assert_eq!(
            table.lines(),
            ["worker        ms", "decode-0       3", "é         1204.5"]
        );
    }

    #[test]
    fn short_rows_are_filled() {
        let mut table = Table::new([("a", Align::Left), ("b", Align::Left)]);
        table.row(["1".into()]);
        table.row(["2".into(), "3".into(), "4".into()]);
        assert_eq!(table.lines(), ["a  b", "1", "2  3"]);
    }
}
