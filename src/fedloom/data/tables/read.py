"""Tables as pandas reads them: CSV, Parquet, Excel, Stata, data frames and folders with a file for each site. Their
cells are numbers and texts."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from fedloom.core.errors import DataError, choices, ending, first_of, parsing
from fedloom.core.lazy import need
from fedloom.core.machine import need_memory
from fedloom.data.prepare import PARTS, Array, need_room, opener
from fedloom.data.tables.workbook import different, harmless, names_of, sheets

if TYPE_CHECKING:
    import pandas

SITE = "site"
"""The column that names the file of each row, where a folder has a file for each site."""
Code = str | int | float
"""A cell that stands for a missing value."""
CODES_FOR_MISSING = (-9, -99, -999, -9999, 999, 9999, 99999)
"""Numbers that are often written for a missing value."""
TEXTS = "texts are classes of a label (classification, or ordinal with its classes in order) or categories of an input"
ENDS = ".csv, .csv.gz, .csv.xz, .tsv, .dta, .xlsx or .parquet"
_NAMES = re.compile(r"(.+)\.((csv|tsv)(\.gz|\.xz)?|parquet|xlsx|dta)", re.IGNORECASE)
_MISSING = ("", "NA", "NaN", "nan")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?inf(inity)?", re.IGNORECASE)
_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")  # 0,912 is none
_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")
_POINT = re.compile(THOUSANDS.pattern + r"\.\d+")
AROUND = re.compile(r"[^\w,.]{0,3}[+-]?\d+([.,]\d+)?[^\d]{0,9}")
_MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DATE = re.compile(
    r"\d{4}[-/]\d\d?[-/]\d\d?([ T].*)?|\d\d?([./-])\d\d?\2\d\d(\d\d)?( .*)?|\d\d?:\d\d(:\d\d.*)?"
    rf"|\d\d?\.?[ -]{_MONTH}[., -]+\d\d(\d\d)?( .*)?|{_MONTH} \d\d?,? \d{{4}}( .*)?",
    re.IGNORECASE,
)
_DAY = re.compile(r"(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])")
_POINTS = re.compile(r"^\s*(\d\d?)\.(\d\d?)\.(\d{4})\b")
"""A date with points: the day stands first in every country."""
_ZIP = b"PK\x03\x04"
_UTF8, _WESTERN = "utf-8-sig", "cp1252"
"""The encodings of CSV files: the second is that of Windows in Western Europe, in which spreadsheets there save."""
_FOREIGN = re.compile(r"[\u00c0-\u00ff]{4}|\ufffd")
"""Four accented letters in a row are in no word of these languages, and what it lacks is replaced by the last."""
_AS_UTF8 = "save it as CSV in UTF-8 or as .xlsx"
_YES = {"y", "yes", "true", "t", "ja", "oui", "si", "sí", "1"}
_NO = {"n", "no", "false", "f", "nein", "non", "0"}


@dataclass(frozen=True, eq=False)
class Table:
    """Rows as they were read, words for where they stand, the column of the sites, and cells that mean missing."""

    frame: pandas.DataFrame
    where: str
    site: str | None = None
    missing: tuple[Code, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    """Name of a column in a file -> its name here."""
    notes: tuple[str, ...] = ()
    """Sentences about files without rows."""
    unclear: Mapping[str, str] = field(default_factory=dict)
    """Column -> why its commas cannot be read."""
    _columns: dict[str, Column] = field(default_factory=dict)

    def column(self, name: str) -> Column:
        """Return a column. Raises DataError where there is none of that name."""
        if name not in self.frame.columns:
            raise DataError(f"{self.where}: no column {name!r}.{choices('Found', name, map(str, self.frame.columns))}")
        if name not in self._columns:
            missing = () if name == self.site else self.missing
            where = f"{self.where}, column {name!r}"
            self._columns[name] = Column(self.frame[name], missing, where, self.unclear.get(name, ""))
        return self._columns[name]


def is_table(path: Path) -> bool:
    """Return whether a path is a table by its name, or a folder with one."""
    return bool(_tables_in(path)) if path.is_dir() else _NAMES.fullmatch(path.name) is not None


def _tables_in(folder: Path) -> list[Path]:
    """Return a folder's tables, without hidden files and those that Excel makes while a workbook is open."""
    files = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith((".", "~$")))
    return sorted(file for file in files if is_table(file))


def read(
    source: Any,
    site: str | None,
    missing: Sequence[Code] = (),
    rename: Mapping[str, str] | None = None,
    texts: Collection[str] = (),
) -> Table:
    """Read a table from a data frame, a file, or a folder with a file for each site.

    A folder's sites are called like its files unless `site` is a column. `rename` is {name of a column: its name here},
    of files that have such a column. The columns `texts` of a CSV file stay as they are written, such as 007. Raises
    DataError where it cannot be read, has no rows, two columns have one name, or no file has a column to rename.
    """
    import pandas

    notes, unclear = tuple[str, ...](), dict[str, str]()
    if isinstance(source, pandas.DataFrame):
        where = "the data frame"
        parts = {"": source.set_axis([str(name) for name in source.columns], axis=1)}
    elif isinstance(source, str | Path):
        path = Path(source).expanduser()
        where = str(path)
        texts = {*texts, site or ""}  # site 01 is not 1
        texts = {*texts, *(name for name, new in (rename or {}).items() if new in texts)}
        parts, notes = _folder(path, texts) if path.is_dir() else _file(path, texts)
    else:
        raise DataError(f"{type(source).__name__} found, expected a pandas.DataFrame, a file or a folder")
    columns = dict.fromkeys(column for frame in parts.values() for column in frame.columns)
    for name, new in (rename or {}).items():
        if name not in columns and new not in columns:
            raise DataError(f"{where}: no column {name!r} to rename.{choices('Found', name, columns)}")
    for part, frame in parts.items():
        with parsing(f"{where}{part and f', {part}'} cannot be read"):
            frame.columns = different([(rename or {}).get(name, name) for name in frame.columns])
    if "" in parts:
        frame = parts[""]
    else:
        frame, site, more, unclear = _joined(path, parts, site)
        notes = (*notes, *more)
    if isinstance(source, str | Path) and site in frame.columns:
        frame[site] = _numbered(frame[site], f"{where}, column {site!r}")
    for name in frame.columns:
        cells = frame[name] if frame[name].dtype == object else ()
        kind = next((type(cell).__name__ for cell in cells if not _is_cell(cell)), None)
        kind = "complex numbers" if frame[name].dtype.kind == "c" else kind
        if kind is not None:
            problem = f"cells of {kind} found, expected numbers or texts: leave the column out"
            raise DataError(f"{where}, column {name!r}: {problem}")
    if not len(frame):
        raise DataError(f"{where}: no row found, expected a line of names and one line per example")
    return Table(frame.reset_index(drop=True), where, site, tuple(missing), rename or {}, notes, unclear)


def _numbered(sites: pandas.Series, where: str) -> pandas.Series:
    """Return sites as they are written, but as numbers where all are numbers and some are written as 1.0.

    Raises DataError where two are one number, such as 1 and 01.
    """
    import pandas

    numbers: dict[float, str] = {}
    for text in (texts := [*map(str, sites.dropna().unique())]):
        if (number := number_of(text)) is None:
            return sites
        first = numbers.setdefault(number, text)
        if first.partition(".")[0] != text.partition(".")[0]:
            one, two = sorted((first, text))
            advice = "write them alike if they are one site, else rename one"
            raise DataError(f"{where}: sites {one!r} and {two!r} found, which are the same number; {advice}")
    return pandas.to_numeric(sites) if any("." in text for text in texts) else sites


def _is_cell(cell: Any) -> bool:
    plain = cell is None or isinstance(cell, str | int | float | Decimal | np.generic | date)
    return plain or cell.__class__.__module__[:6] == "pandas"


def _folder(path: Path, texts: Collection[str]) -> tuple[dict[str, pandas.DataFrame], tuple[str, ...]]:
    """Return the table of each file of a folder, by the file's name without its ending, and notes."""
    if not (files := _tables_in(path)):
        raise DataError(f"{path}: no table found in the folder, expected a file for each site that ends in {ENDS}")
    frames: dict[str, pandas.DataFrame] = {}
    whose: dict[str, Path] = {}
    notes: list[str] = []
    for file in files:
        name = _NAMES.sub(r"\1", file.name)
        if name in whose:
            alike = f"files {whose[name].name!r} and {file.name!r} would both be site {name!r}"
            raise DataError(f"{path}: {alike}; rename one, or remove it if it is a copy")
        parts, more = _file(file, texts)
        (first, frames[name]), *others = parts.items()
        notes += [f"file {name!r}: {note}" for note in more]
        if others:
            both = f"sheets {first!r} and {others[0][0]!r} have cells"
            raise DataError(f"{file}: {both}, expected one such sheet in each workbook of a folder")
        whose[name] = file
    return frames, tuple(notes)


def _joined(
    path: Path, frames: dict[str, pandas.DataFrame], site: str | None
) -> tuple[pandas.DataFrame, str, tuple[str, ...], dict[str, str]]:
    """Return the rows of all files of a folder, or sheets of a workbook, the column of the sites, notes about those
    without rows, and columns whose commas cannot be read, with the reason."""
    import pandas

    what = "file" if path.is_dir() else "sheet"
    folded: dict[str, tuple[str, str]] = {}
    for name, one in frames.items():
        for column in one.columns:
            first, other = folded.setdefault(column.casefold(), (column, name))
            if first not in one.columns and column not in frames[other].columns:
                found = f"columns {first!r} (in {other}) and {column!r} (in {name}) differ in case only"
                raise DataError(f"{path}: {found}; write them alike if they are one column, else rename one")
    named = [name for name, one in frames.items() if SITE in one.columns]
    if site is None and named:
        advice = f"so the {what} names are not used as sites: name the column of the sites"
        raise DataError(f"{path}, {named[0]}: has a column {SITE!r}, {advice}")
    if site is None or (site == SITE and not named):
        site = SITE
        frames = {name: one.assign(**{SITE: name}) for name, one in frames.items()}
    notes = tuple(f"{what} {name!r} is left out: it has no rows" for name, one in frames.items() if not len(one))
    if parts := [name for name in frames if name.lower() in PARTS]:  # test rows would be trained on
        found = f"{what}s {', '.join(parts)} found, which are parts of a split"
        if site == SITE and not named:
            advice = (
                f"put all rows into one {what}; each site's rows are split anew, by data.test_fraction or data.time"
            )
            raise DataError(f"{path}: {found}, expected a {what} for each site; {advice}")
        notes = (*notes, f"{found}: their rows are joined, and each site's rows are split anew")
    having = Counter(column for one in frames.values() for column in one.columns)
    for name, one in frames.items():
        lacks = sorted(column for column, n in having.items() if n == len(frames) - 1 and column not in one.columns)
        if lacks and (alone := [column for column in one.columns if having[column] == 1]):
            found = f"{what} {name!r} has no column {first_of(lacks)}, and alone has {first_of(alone)}"
            notes = (*notes, f"{found}; where they are the same, use --rename or data.rename")
    rows = pandas.concat(frames.values(), ignore_index=True)
    texts = [name for name in rows.columns if rows[name].dtype.kind == "O"]
    return rows, site, notes, {name: why for name in texts if (why := _commas(name, frames))}


def _commas(column: str, frames: Mapping[str, pandas.DataFrame]) -> str:
    """Return why the commas of a column cannot be read, or an empty text: one file does not tell whether they are
    decimal, and in another one they are."""
    decimal, other = "", ""
    for name, one in frames.items():
        texts = [text_of(cell) for cell in one[column].dropna().unique()] if column in one.columns else []
        if any(map(_is_decimal, texts)):
            decimal = decimal or name
        elif any(THOUSANDS.fullmatch(text) or _POINT.fullmatch(text) for text in texts):
            other = other or name
    if not (decimal and other):
        return ""
    forms = f"numbers of a form such as 1,000 found at {other}, where the comma may be decimal or not, and"
    return f"{forms} of a form such as 1000,0 at {decimal}; write numbers alike at all sites, or leave the column out"


def _file(path: Path, texts: Collection[str]) -> tuple[dict[str, pandas.DataFrame], tuple[str, ...]]:
    """Return the table of a file, by an empty name; of a workbook with several the table of each sheet, and notes."""
    import pandas

    if not path.is_file():
        if path.exists():
            raise DataError(f"{path}: a pipe or a device found, expected a file or folder")
        raise DataError(f"{path}: the file or folder does not exist")
    if not is_table(path):
        raise DataError(f"{path}: expected a name that ends in {ENDS}; save a spreadsheet as CSV in UTF-8 or as .xlsx")
    if ending(path) == "parquet":
        parquet = need("pyarrow.parquet", "data")
        with parsing(f"{path} cannot be read as a Parquet file"):
            about = parquet.read_metadata(path)
        need_memory(16 * about.num_rows * about.num_columns, str(path))  # a few bytes may be a million equal cells
        with parsing(f"{path} cannot be read as a Parquet file"):
            return {"": pandas.read_parquet(path).rename(columns=str)}, ()
    if ending(path) == "xlsx":
        need("python_calamine", "excel")
        with parsing(f"{path} cannot be read as an Excel workbook"):
            found, notes = sheets(path)
            return {name if len(found) > 1 else "": frame for name, frame in found.items()}, notes
    need_room(path, 8)
    if ending(path) == "dta":
        with parsing(f"{path} cannot be read as a Stata file"):
            return {"": pandas.read_stata(path)}, ()
    with parsing(f"{path} cannot be read as a .csv file"):
        encoding, note = _UTF8, ""
        try:
            names, separator, skipped = _head(path, encoding)
        except UnicodeDecodeError:
            encoding = _WESTERN
            names, separator, skipped = _head(path, encoding)
            read_as = "it is not in UTF-8 and is read as Windows-1252 (Western Europe)"
            note = f"{path.name}: {read_as}; if letters are wrong, save it as CSV in UTF-8"
        plain: dict[str, Any] = {"index_col": False, "encoding": encoding, "low_memory": False}
        cells: dict[str, Any] = {"na_values": list(_MISSING), "keep_default_na": False, "skipinitialspace": True}
        cells["dtype"] = dict.fromkeys(texts, str)
        settings = {"sep": separator, "header": 0, "skiprows": skipped, "names": names, **plain, **cells}
        frame = pandas.read_csv(path, **settings)
        real = [name for name in frame if frame[name].dtype.kind == "f"]
        others = (text_of(cell) for name in frame if frame[name].dtype.kind == "O" for cell in frame[name].unique())
        if real and any(map(_is_decimal, others)):  # then 1.234 is a thousand
            for name, column in pandas.read_csv(path, **settings | {"dtype": str, "usecols": real}).items():
                if _are_grouped(column.dropna().unique()):
                    frame[name] = pandas.to_numeric(column.str.replace(".", "", regex=False))
            real = []
        some = [name for name in real if _may_be_grouped(frame[name].to_numpy())]
        cells_of = pandas.read_csv(path, **settings | {"dtype": str, "usecols": some}) if some else frame[[]]
        sayings = (_point_in(name, column.dropna().unique()) for name, column in cells_of.items())
        return {"": frame}, tuple(filter(None, (note, *sayings)))


def _head(path: Path, encoding: str) -> tuple[list[str], str, int]:
    """Return the names of a CSV file's columns, its separator, and how many lines stand above the names. Raises
    ValueError where a line has other cells, which pandas would fill up or cut, and for another encoding."""
    with path.open("rb") as file:
        if file.read(4) == _ZIP:
            raise ValueError("it is an Excel file or a ZIP archive; save its table as CSV in UTF-8, or name it .xlsx")
    errors = "replace" if encoding == _WESTERN else "strict"
    with opener(path)(path, "rt", encoding=encoding, errors=errors, newline="") as file:
        first = file.readline()
        stated = re.fullmatch(r"sep=(.)\s*", first)  # a line that spreadsheets write
        separator = stated[1] if stated else max(",;\t|", key=re.sub(r'"[^"]*"', "", first).count)
        if not stated:
            file.seek(0)
        lines = csv.reader(_plain(file, encoding), delimiter=separator, strict=True, skipinitialspace=True)
        read = 0
        try:
            head = next((line for line in lines if line), [])
            if not head:
                raise ValueError("it is empty")
            read = lines.line_num
            for line in lines:
                if line and len(line) != len(head):
                    number = lines.line_num + bool(stated)
                    raise ValueError(
                        f"line {number}: expected {len(head)} cells like the first line, found {len(line)}; remove "
                        "lines above the names and below the rows, and quote cells with separators in them"
                    )
                read = lines.line_num
        except csv.Error as error:
            where = f"the row that begins in line {read + bool(stated) + 1}: {error}"
            raise ValueError(f"{where}; check its quotation marks, of which a quoted cell has each twice") from None
    return names_of(head), separator, int(bool(stated))


def _plain(file: Iterable[str], encoding: str) -> Iterator[str]:
    """Yield a file's lines. Raises ValueError for a NUL byte, which pandas would skip, and for another encoding."""
    for line in file:
        if "\0" in line:
            raise ValueError(f"there is a NUL byte in it; {_AS_UTF8}")
        if encoding == _WESTERN and (wrong := _FOREIGN.search(line)):
            raise ValueError(f"{wrong[0]!r} found, letters of another encoding; {_AS_UTF8}")
        yield line


def text_of(value: Any) -> str:
    """Return a cell as text, without control characters: whole numbers without a point, so 1 and 1.0 are one class."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | float | Decimal | np.integer | np.floating):
        number = float(value)
        return str(int(value)) if number.is_integer() and abs(number) < 1e15 else repr(number)
    return harmless(" ".join(str(value).split()))


def number_of(text: str, comma: Literal["", "decimal", "thousands"] = "") -> float | None:
    """Return the number that a text is; with a `comma` also one such as 1.234,5 or 1,234.5."""
    text = text.replace("\N{MINUS SIGN}", "-")
    if _NUMBER.fullmatch(text):
        return float(text)
    if comma == "decimal" and _COMMA.fullmatch(text):
        return float(text.replace(".", "").replace(",", "."))
    if comma == "thousands" and (THOUSANDS.fullmatch(text) or _POINT.fullmatch(text)):
        return float(text.replace(",", ""))
    return None


def _is_decimal(text: str) -> bool:
    """Return whether a text is a number with a decimal comma for certain: 1,234 may be a thousand."""
    return _COMMA.fullmatch(text) is not None and not THOUSANDS.fullmatch(text)


def _are_grouped(texts: Iterable[str]) -> bool:
    """Return whether points part thousands, where the comma is decimal: three digits follow each point."""
    pointed = [text for text in texts if "." in text and "," not in text]
    return bool(pointed) and all(map(_GROUPS.fullmatch, pointed))


def _may_be_grouped(numbers: Array) -> bool:
    """Return whether numbers that were read as decimal ones may be 1.200 beside 950, with a point for thousands."""
    values = np.abs(numbers[np.isfinite(numbers)])
    whole = values % 1 == 0
    few = values[~whole]
    thousandths = np.round(few * 1000)
    is_short = bool(len(few)) and few.min() >= 1 and bool(np.allclose(few * 1000, thousandths, rtol=0, atol=1e-6))
    return is_short and few.max() < 1000 and bool((values[whole] >= 100).any()) and values.max() < 1000


def _point_in(name: str, texts: Sequence[str]) -> str:
    """Return a sentence about a column with numbers such as 1.200 beside 950, or an empty text for others."""
    one = next((text for text in texts if "." in text), "")
    two = max((text for text in texts if "." not in text), key=len, default="")
    if len(two) != 3 or not _are_grouped(texts):
        return ""
    read_as = f"{one} beside {two} is read as {number_of(one):g}"
    return f"{name}: {read_as}; if the point parts thousands, write numbers without it"


def _point_for_comma(text: str) -> str:
    """Return a number with a decimal comma as `text_of` writes it, any other text as it is."""
    number = number_of(text, "decimal")
    return text if number is None else text_of(number)


class Column:
    """One column's cells: as texts or as numbers, whatever they were read as. `where` is for messages."""

    def __init__(self, series: pandas.Series, missing: Sequence[Code] = (), where: str = "", unclear: str = "") -> None:
        self.name, self.series = str(series.name), series
        self.codes = {text_of(code) for code in missing} | set(_MISSING)
        self.where, self.unclear = where, unclear

    def fail(self, problem: str) -> NoReturn:
        """Raise DataError for the column."""
        raise DataError(f"{self.where}: {problem}")

    @property
    def is_stored_as_numbers(self) -> bool:
        """Return whether pandas stores the cells as numbers."""
        return self.series.dtype.kind in "iuf"

    @property
    def _is_numpy(self) -> bool:
        """Return whether they are numbers as numpy has them, without pandas' own missing value."""
        return self.is_stored_as_numbers and not hasattr(self.series.dtype, "na_value")

    @property
    def numeric_codes(self) -> list[float]:
        """The numbers among the codes that mean missing."""
        return [number for code in self.codes if (number := number_of(code)) is not None]

    @cached_property
    def is_date(self) -> bool:
        """Return whether the cells are dates or times."""
        if self.series.dtype.kind in "mM":
            return True
        if self.is_stored_as_numbers and not self.series.max() >= 1900_01_01:
            return False
        looks = _DAY if self.is_stored_as_numbers else _DATE
        some = [text_of(cell) for cell in self.series.dropna().unique()[:100]]
        some = [text for text in some if text not in self.codes]
        return bool(some) and sum(looks.fullmatch(text) is not None for text in some) > 0.9 * len(some)

    def times(self) -> Array:
        """Return each row's number or time (float64, in order). Raises DataError for a cell that is neither."""
        import pandas

        times = self.numbers
        if self.series.dtype.kind in "mM" or (self.is_date and self.not_numbers):
            cells = self.series
            if cells.dtype.kind not in "mM" and all(_POINTS.match(text) for text in self.distinct):
                cells = cells.astype(str).str.replace(_POINTS, lambda d: f"{d[3]}-{d[2]:0>2}-{d[1]:0>2}", regex=True)
            found = pandas.to_datetime(cells, format="ISO8601", utc=True, errors="coerce")
            times = np.where(found.isna(), np.nan, found.astype("int64").to_numpy(np.float64))
        if len(wrong := np.flatnonzero(~np.isfinite(times))):
            cell = text_of(self.series.iloc[wrong[0]])
            found_there = f"{len(wrong)} rows without a time found, such as row {wrong[0] + 1} with {cell!r}"
            self.fail(f"{found_there}; expected numbers, or times such as 2024-03-31 or 2024-03-31T14:00+02:00")
        return times

    @property
    def are_texts(self) -> bool:
        """Return whether most of the different cells are no numbers."""
        return 2 * len(self.not_numbers) > len(self.distinct)

    @cached_property
    def _texts(self) -> tuple[Array, list[str]]:
        from pandas import factorize

        index, cells = factorize(self.series if self._is_numpy else self.series.astype(object), use_na_sentinel=True)
        texts = [text_of(cell) for cell in cells]
        if not self.unclear and any(map(_is_decimal, texts)) and not any(map(_POINT.fullmatch, texts)):
            # 1,0 is the class 1, as 1.0 is in another site's file
            if _are_grouped(texts):
                texts = [text if "," in text else text.replace(".", "") for text in texts]
            texts = [text if text in self.codes else _point_for_comma(text) for text in texts]
        numbers = {text: number_of(text) for text in texts if text not in self.codes}
        names = sorted(numbers, key=lambda text: (numbers[text] is None, numbers[text] or 0.0, text))
        places = {name: place for place, name in enumerate(names)}
        return np.array([*(places.get(text, -1) for text in texts), -1])[index], names

    @property
    def distinct(self) -> list[str]:
        """All texts there are, numbers in the order of their size."""
        return self._texts[1]

    @property
    def index(self) -> Array:
        """The number of each row's text among `distinct`, -1 where it is missing."""
        return self._texts[0]

    def has(self, code: Code) -> bool:
        """Return whether a cell is `code`."""
        text = text_of(code)
        if self.is_stored_as_numbers:
            return (number := number_of(text)) is not None and bool((self.series == number).any())
        return any(text_of(cell) == text for cell in self.series.unique())

    @property
    def order(self) -> list[str] | None:
        """The texts in the order that the data frame declares for them (an ordered pandas.Categorical); else None."""
        categories = getattr(self.series, "cat", None)
        if categories is None or not categories.ordered:
            return None
        return [text for each in categories.categories if (text := text_of(each)) in self.distinct]

    def _per_row(self, values: Iterable[float], missing: float) -> Array:
        """Return the value of each row, of one value for each text."""
        return np.array([*values, missing])[self.index]

    @cached_property
    def _numbers(self) -> tuple[Array, list[str]]:
        if self.unclear:
            self.fail(self.unclear)
        if self._is_numpy:
            values = self.series.to_numpy(np.float64)
            codes = self.numeric_codes
            return (np.where(np.isin(values, codes), np.nan, values) if codes else values), []
        # 1,234 may be a thousand or one and a bit: the other cells of the column decide, else nobody does.
        pointed = any(map(_POINT.fullmatch, self.distinct))
        numbers = [number_of(text, "thousands" if pointed else "") for text in self.distinct]
        strange = [text for text, number in zip(self.distinct, numbers, strict=True) if number is None]
        return self._per_row((np.nan if number is None else number for number in numbers), np.nan), strange

    @property
    def numbers(self) -> Array:
        """Each row's number (float64), NaN where the cell is missing or no number."""
        return self._numbers[0]

    @property
    def not_numbers(self) -> list[str]:
        """The texts that are no number."""
        return self._numbers[1]

    @cached_property
    def yes(self) -> Array | None:
        """1 for yes, 0 for no, NaN for missing (N), where the cells are yes and no."""
        words = [text.lower() for text in self.distinct]
        both = {word in _YES for word in words}
        if not set(words) <= _YES | _NO or (len(both) < 2 and len({*words}) > 1):
            return None
        return self._per_row((float(word in _YES) for word in words), np.nan)

    def yes_or_no(self) -> Array:
        """Return 1 for yes, 0 for no, NaN for missing. Raises DataError for a cell that is none of them."""
        if self.yes is None:
            self.fail(f"{quoted(self.distinct)} found, expected yes and no, such as 1 and 0 or Y and N")
        return self.yes

    def coded(self, names: Sequence[str]) -> tuple[Array, list[str]]:
        """Return each row's position among `names` (-1: missing or not among them), and the texts that are not."""
        places = {_point_for_comma(name) if _is_decimal(name) else name: place for place, name in enumerate(names)}
        places |= {name: place for place, name in enumerate(names)}
        index = self._per_row((places.get(text, -1) for text in self.distinct), -1)
        return index, [text for text in self.distinct if text not in places]

    @property
    def present(self) -> Array:
        """Return which rows have a value (N, bool)."""
        return ~np.isnan(self.numbers) if self.is_stored_as_numbers else self.index >= 0

    def code(self, rows: Array | slice = slice(None)) -> tuple[int, str] | None:
        """Return a number that looks like a code for missing among some rows, and how it stands out; else None."""
        values = self.numbers[rows]
        values = values[np.isfinite(values)]
        ends = {values.min(), values.max()} if len(values) else set()
        for code in ends.intersection(CODES_FOR_MISSING):
            others = values[values != code]
            most = np.abs(others).max(initial=0)
            far = most < code / 4 or (most < code / 2 and code - others.mean() > 5 * others.std())
            apart = others.min(initial=0) >= 0 if code < 0 else far
            if len(values) - len(others) >= 3 and apart:
                what = "a number" if not len(others) else "below 0" if code < 0 else "nearly as large"
                return int(code), f"no other is {what}"
        return None

    def finite(self) -> Array:
        """Return the numbers, NaN where they are missing. Raises DataError for a cell that is none, or infinite."""
        if self.not_numbers:
            rows = np.flatnonzero(self.present & np.isnan(self.numbers))
            text = self.distinct[self.index[rows[0]]]
            problem = f"{text!r} found, expected a number (texts in {len(rows)} of {len(self.index)} rows)"
            correct = f"correct the cell, or leave it empty if it is missing (in a recipe: missing: [{text!r}])"
            self.fail(f"row {rows[0] + 1}: {problem}; {TEXTS if self.are_texts else correct}")
        if infinite := int(np.isinf(self.numbers).sum()):
            self.fail(f"expected finite numbers, found {infinite} that are infinite")
        return self.numbers


def quoted(texts: Sequence[str]) -> str:
    """Return the first three of some texts for a message."""
    return ", ".join(map(repr, texts[:3])) or "nothing"
