"""Each form that data come in works, or is refused in one sentence: one table of them all."""

import datetime
import decimal
import pickle

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import scipy.sparse
import xarray as xr

from modes import FAST
from targets import gradient_of

from pymc_sghmc import SGHMC
from pymc_sghmc.loaders import ArrayLoader, DaskLoader, ParquetLoader
from pymc_sghmc.rows.containers import containers_of
from pymc_sghmc.rows.forms import known_form
from pymc_sghmc.rows.given_data import given_arrays
from pymc_sghmc.rows.sources import Source

N = 60
PREDICTORS = ["age", "dose"]
CLINICS = ["north", "south", "west"]
rng = np.random.default_rng(0)
X = rng.integers(0, 90, (N, 2)).astype(float)
Y = rng.integers(0, 9, N).astype(float)  # whole numbers, which every type holds
CLINIC = rng.integers(0, 3, N)
NAMES = np.array(CLINICS)[CLINIC]
ROWS = {"X": X, "y": Y, "clinic": CLINIC}
WORKS = "works"


def frame(**changes):
    columns = {"age": X[:, 0], "dose": X[:, 1], "y": Y, "clinic": NAMES, "note": "unused"}
    return pd.DataFrame({**columns, **changes})


def small_model():
    """With five rows, predictors named by coords, and codes of clinics whose names are coords."""
    with pm.Model(coords={"predictor": PREDICTORS, "place": CLINICS}) as model:
        beta = pm.Normal("beta", 0, 1, dims="predictor")
        effect = pm.Normal("effect", 0, 1, dims="place")
        x = pm.Data("X", X[:5], dims=("row", "predictor"))
        y = pm.Data("y", Y[:5])
        clinic = pm.Data("clinic", CLINIC[:5])
        pm.Normal("likelihood", x @ beta + effect[clinic], 1, observed=y)
    return model


MODEL = small_model()
CONTAINERS = containers_of(MODEL)


def with_(**changes):
    return {**ROWS, **changes}


def column(make):
    """A row of the table of a vector of numbers, in some library."""
    return lambda path: with_(y=make(Y))


def pandas_column(values, dtype=None):
    return lambda path: with_(y=pd.Series(values, dtype=dtype))


def missing_at(values, *places):
    values = list(values)
    for place in places:
        values[place] = None
    return values


def polars(make):
    return lambda path: make(pytest.importorskip("polars"))


def dask(make):
    pytest.importorskip("dask")
    return make(pytest.importorskip("dask.array"), pytest.importorskip("dask.dataframe"))


def arrow(make):
    return lambda path: make(pytest.importorskip("pyarrow"))


def on_disk(path, dtype="f8"):
    mapped = np.memmap(path / "y", dtype, "w+", shape=N)
    mapped[:] = Y
    return mapped


def zarr_arrays(path):
    zarr = pytest.importorskip("zarr")
    arrays = {}
    for name, rows in ROWS.items():
        array = zarr.open_array(
            str(path / name),
            mode="w",
            shape=rows.shape,
            chunks=(7, *rows.shape[1:]),
            dtype=rows.dtype,
        )
        array[:] = rows
        arrays[name] = array
    return arrays


def hdf5_arrays(path):
    h5py = pytest.importorskip("h5py")
    file = h5py.File(path / "rows.h5", "w")
    return {name: file.create_dataset(name, data=rows) for name, rows in ROWS.items()}


def test_hdf5_arrays_are_opened_again_by_other_processes(tmp_path):
    h5py = pytest.importorskip("h5py")
    hdf5_arrays(tmp_path)["y"].file.close()  # it was open for writing
    file = h5py.File(tmp_path / "rows.h5", "r")
    loader = ArrayLoader({name: file[name] for name in ROWS}, block_rows=7)
    again = pickle.loads(pickle.dumps(loader))
    assert len(again) == N
    for ours, expected in zip(again, loader, strict=True):
        for name in ROWS:
            np.testing.assert_array_equal(ours[name], expected[name])


def no_rows(path):
    frame().iloc[:0].to_parquet(path / "rows.parquet")
    return path / "rows.parquet"


def damaged(path):
    file = parquet(path)
    content = bytearray(file.read_bytes())
    content[4:2000] = bytes(1996)  # the pages of the first columns, not the footer
    file.write_bytes(content)
    return file


def parquet(path, keep_index=False, **changes):
    pytest.importorskip("pyarrow")
    frame(**changes).to_parquet(path / "rows.parquet", row_group_size=13)
    return path / "rows.parquet"


def in_a_store(path):
    """A folder key=value in fsspec's store in memory, which stands for others."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for part, rows in enumerate(np.array_split(np.arange(N), 3)):
        place = f"/{path.name}/trial/part={part}"
        store.mkdirs(place)
        with store.open(f"{place}/rows.parquet", "wb") as file:
            frame().iloc[rows].to_parquet(file)
    return f"memory://{path.name}/trial"


def hive(path):
    pytest.importorskip("pyarrow")
    frame().to_parquet(path / "rows", partition_cols=["clinic", "dose"])
    return path / "rows"


def parts(path, **columns_of_second):
    """Paths of two files, of which the second has other columns; None: it lacks the column."""
    pytest.importorskip("pyarrow")
    second = frame().iloc[20:].assign(**columns_of_second)
    lacking = [name for name, values in columns_of_second.items() if values is None]
    files = [str(path / "first.parquet"), path / "second.parquet"]
    frame().iloc[:20].to_parquet(files[0])
    second.drop(columns=lacking).to_parquet(files[1])
    return files


def csv(path):
    pytest.importorskip("pyarrow")
    frame().to_csv(path / "rows.csv")
    return str(path / "rows.csv")


class Tensor:
    """What NumPy sees of a tensor of torch's in the CPU's memory."""

    def __init__(self, array, error=None):
        self.array = array
        self.error = error

    def __array__(self, dtype=None, copy=None):
        if self.error:
            raise TypeError(self.error)
        return np.array(self.array, dtype)


class Exchanged:
    """An array that has the protocol DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@dataclass
class Batches:
    """A loader in torch's style: len is the number of batches, that of the data set of rows."""

    make: Any  # from rows to a batch
    dataset: Any = range(N)
    size: int = 8

    def __len__(self):
        return -(-N // self.size)

    def __iter__(self):
        for start in range(0, N, self.size):
            yield self.make({name: rows[start : start + self.size] for name, rows in ROWS.items()})


class NRows(Batches):
    n_rows = N


def batches(make, **options):
    return lambda path: Batches(make, **options)


def as_tensors(rows):
    return [Tensor(array) for array in rows.values()]


def as_frame(rows):
    columns = {"age": rows["X"][:, 0], "dose": rows["X"][:, 1], "y": rows["y"]}
    return pd.DataFrame({**columns, "clinic": np.array(CLINICS)[rows["clinic"]]})


# Form, how it is made of a folder, and "works" or words of the refusal.
FORMS = [
    # NumPy
    ("NumPy, bool", lambda path: with_(y=Y > 4), (Y > 4).astype(float)),
    ("NumPy, int8", column(lambda y: y.astype("i1")), WORKS),
    ("NumPy, uint64", column(lambda y: y.astype("u8")), WORKS),
    ("NumPy, float16", column(lambda y: y.astype("f2")), WORKS),
    ("NumPy, float32", column(lambda y: y.astype("f4")), WORKS),
    ("NumPy, long double", column(lambda y: y.astype(np.longdouble)), WORKS),
    ("NumPy, big-endian", column(lambda y: y.astype(">f8")), WORKS),
    ("NumPy, complex", column(lambda y: y + 1j), "dtype complex128"),
    ("NumPy, objects that are numbers", column(lambda y: y.astype(object)), WORKS),
    ("NumPy, objects that are none", column(lambda y: np.array([{}] * N)), "holds objects"),
    ("NumPy, strings of numbers", column(lambda y: y.astype(str)), "holds text .*'5.0'"),
    ("NumPy, dates", column(lambda y: y.astype("M8[D]")), "holds dates or times"),
    ("NumPy, masked", column(lambda y: np.ma.masked_less(y, 0)), WORKS),
    ("NumPy, masked, some are", column(lambda y: np.ma.masked_equal(y, 8)), "missing values"),
    ("NumPy, NaN", lambda path: with_(X=np.where(X[0] == X, np.nan, X)), "in column 'age', . in column 'dose'"),
    ("NumPy, Fortran order", lambda path: with_(X=np.asfortranarray(X)), WORKS),
    ("NumPy, a view", lambda path: with_(X=np.repeat(X, 2, axis=0)[::2]), WORKS),
    ("NumPy, one number", lambda path: with_(y=np.array(1.0)), "is a single number"),
    ("NumPy, one column for a vector", lambda path: with_(y=Y[:, None]), r"pass a vector: array\[:, 0\]"),
    ("NumPy, whole floats for integers", lambda path: with_(clinic=CLINIC.astype(float)), WORKS),
    ("NumPy, fractions for integers", lambda path: with_(clinic=CLINIC + 0.5), r"the value \d.5, which"),
    ("NumPy, beyond 32 bits for int32", lambda path: with_(clinic=CLINIC + 2**32), "the value 42949.*int32"),
    ("NumPy, rows that differ in number", lambda path: with_(y=Y[1:]), "'y' has 59"),
    ("NumPy, without a name", lambda path: X, "of type ndarray, without a name"),
    ("np.memmap", lambda path: with_(y=on_disk(path)), WORKS),
    ("np.memmap, big-endian", lambda path: with_(y=on_disk(path, ">f8")), "dtype >f8, .*ArrayLoader"),
    ("lists", lambda path: {name: rows.tolist() for name, rows in ROWS.items()}, WORKS),
    ("tuples", lambda path: with_(y=tuple(Y)), WORKS),
    ("lists of unequal lengths", lambda path: with_(X=[[1.0], [1.0, 2.0]]), "can't be read as an array"),
    ("a list of arrays", lambda path: [X, Y, CLINIC], "data= is of type list. Pass a dict"),
    ("None for rows", lambda path: with_(y=None), "is of type NoneType"),
    ("sparse", lambda path: with_(X=scipy.sparse.csr_array(X)), r"sparse array.*toarray\(\)"),
    ("torch: tensor", column(Tensor), WORKS),
    ("torch: tensor on a GPU", column(lambda y: Tensor(y, "Use Tensor.cpu()")), r"read as an array: Use Tensor\.cpu"),
    ("DLPack", column(Exchanged), WORKS),
    # pandas
    ("pandas: columns in a dict", lambda path: with_(X=frame()[PREDICTORS], y=frame()["y"]), WORKS),
    ("pandas: columns in another order", lambda path: with_(X=frame()[PREDICTORS[::-1]]), WORKS),
    ("pandas: a whole frame", lambda path: frame(), WORKS),
    ("pandas: other indexes", lambda path: with_(y=pd.Series(Y, index=range(N, 0, -1))), WORKS),
    ("pandas: frame of one column for a vector", lambda path: with_(y=frame()[["y"]]), 'frame."name". of a frame'),
    ("pandas: frame of no columns", lambda path: pd.DataFrame(index=range(N)), "no column 'X', only none"),
    ("pandas: frame of no rows", lambda path: frame().iloc[:0], "the arrays have no rows"),
    ("pandas: frame without a column", lambda path: frame().drop(columns="dose"), "has no 'dose', only 'age'"),
    ("pandas: two columns of a name", lambda path: with_(X=pd.concat([frame()["age"]] * 2, axis=1)), "are named 'age'"),
    ("pandas: one column misspelled", lambda path: with_(X=frame()[PREDICTORS[::-1]].rename(columns={"age": "age "})), r"without a column are .'age'"),
    ("pandas: wholly other columns", lambda path: with_(X=frame()[PREDICTORS].set_axis(["u", "v"], axis=1)), WORKS),
    ("pandas: missing values", lambda path: frame(dose=missing_at(X[:, 1], 3, 5)), r"2 in column 'dose'\).*dropna"),
    ("pandas: Int64", pandas_column(Y.astype(int), "Int64"), WORKS),
    ("pandas: Int64 with <NA>", pandas_column(missing_at(Y, 1), "Int64"), r"missing values \(1\)"),
    ("pandas: Float64", pandas_column(Y, "Float64"), WORKS),
    ("pandas: boolean", pandas_column(Y > 4, "boolean"), (Y > 4).astype(float)),
    ("pandas: boolean with <NA>", pandas_column(missing_at(Y > 4, 1, 2), "boolean"), r"missing values \(2\)"),
    ("pandas: Sparse", pandas_column(Y, pd.SparseDtype(float, 0.0)), WORKS),
    ("pandas: mixed dtypes", lambda path: frame(age=X[:, 0].astype("i2"), dose=X[:, 1].astype("f4")), WORKS),
    ("pandas: text with coords", lambda path: with_(clinic=pd.Series(NAMES)), WORKS),
    ("pandas: categories with coords", lambda path: frame(clinic=pd.Categorical(NAMES, CLINICS[::-1])), WORKS),
    ("pandas: categories, one missing", lambda path: with_(clinic=pd.Series(missing_at(NAMES, 0), dtype="category")), r"missing values \(1\)"),
    ("pandas: one label misspelled", lambda path: with_(clinic=np.where(np.arange(N) == 5, "West", NAMES).astype(object)), "'West' is no label"),
    ("pandas: other text than coords", lambda path: with_(clinic=pd.Series(NAMES).str.upper()), "holds text .*'NORTH'.*cat.codes"),
    ("pandas: text for numbers", pandas_column(NAMES), "holds text .*float64 in the model"),
    ("pandas: categories for numbers", pandas_column(NAMES, "category"), "holds text .*float64 in the model"),
    ("pandas: categories that are numbers", pandas_column(Y + 3, "category"), "categorical, with numbers"),
    ("pandas: categories that look like codes", lambda path: with_(clinic=pd.Series(CLINIC, dtype="category")), "categorical, with numbers"),
    ("pandas: dates", pandas_column(pd.Timestamp("2020-01-01") + pd.to_timedelta(Y, "D")), "holds dates or times"),
    ("pandas: dates with a zone", pandas_column([pd.Timestamp("2020-01-01", tz="UTC")] * N), "holds objects .*Timestamp"),
    # Polars
    ("Polars: a whole frame", polars(lambda pl: pl.DataFrame(frame().to_dict("list"))), WORKS),
    ("Polars: columns in a dict", polars(lambda pl: with_(X=pl.DataFrame(X, PREDICTORS), y=pl.Series(Y))), WORKS),
    ("Polars: categories", polars(lambda pl: with_(clinic=pl.Series(NAMES.tolist(), dtype=pl.Categorical))), WORKS),
    ("Polars: null", polars(lambda pl: with_(y=pl.Series(missing_at(Y.astype(int).tolist(), 1)))), r"missing values \(1\)"),
    ("Polars: lists", polars(lambda pl: with_(y=pl.Series([[1.0], [2.0, 3.0]] * (N // 2)))), "holds objects"),
    ("Polars: a lazy frame", polars(lambda pl: pl.DataFrame({"y": Y}).lazy()), r"LazyFrame, which has no.*collect\(\)"),
    # Arrow
    ("Arrow: a table", arrow(lambda pa: pa.Table.from_pandas(frame())), WORKS),
    ("Arrow: a batch", arrow(lambda pa: pa.RecordBatch.from_pandas(frame())), WORKS),
    ("Arrow: an array", arrow(lambda pa: with_(y=pa.array(Y))), WORKS),
    ("Arrow: chunks", arrow(lambda pa: with_(y=pa.chunked_array([Y[:9], Y[9:]]))), WORKS),
    ("Arrow: dictionary", arrow(lambda pa: with_(clinic=pa.array(NAMES).dictionary_encode())), WORKS),
    ("Arrow: null", arrow(lambda pa: with_(y=pa.array(missing_at(Y, 1, 2)))), r"missing values \(2\)"),
    ("Arrow: decimals", arrow(lambda pa: with_(y=pa.array(map(decimal.Decimal, Y.astype(int).tolist())))), WORKS),
    ("Arrow: lists", arrow(lambda pa: with_(y=pa.array([[1.0, 2.0]] * N))), "holds objects .*array"),
    # xarray
    ("xarray: arrays", lambda path: {name: xr.DataArray(rows) for name, rows in ROWS.items()}, WORKS),
    ("xarray: dims in another order", lambda path: with_(X=xr.DataArray(X.T, dims=("predictor", "row"))), WORKS),
    ("xarray: labels in another order", lambda path: with_(X=xr.DataArray(X[:, ::-1], dims=("i", "j"), coords={"j": PREDICTORS[::-1]})), WORKS),
    ("xarray: a label misspelled", lambda path: with_(X=xr.DataArray(X, dims=("i", "j"), coords={"j": ["Age", "weight"]})), "columns without a label"),
    ("xarray: a dataset of columns", lambda path: xr.Dataset.from_dataframe(frame()), WORKS),
    ("xarray: a dataset of arrays", lambda path: xr.Dataset({"X": (("i", "j"), X), "y": ("i", Y), "clinic": ("i", CLINIC)}), WORKS),
    # In files, and computed later
    ("Zarr", zarr_arrays, WORKS),
    ("HDF5", hdf5_arrays, WORKS),
    ("ArrayLoader", lambda path: ArrayLoader(ROWS, block_rows=7), WORKS),
    ("ArrayLoader of a frame", lambda path: ArrayLoader(frame()), "arrays is of type DataFrame. Pass a dict .* goes to data= as it is"),
    ("ArrayLoader of a list", lambda path: ArrayLoader([X, Y]), "arrays is of type list. Pass a dict"),
    ("ArrayLoader of lists", lambda path: ArrayLoader(with_(y=Y.tolist())), "'y' is of type list, which has no shape"),
    ("Parquet: a file", parquet, WORKS),
    ("Parquet: its path as text", lambda path: str(parquet(path)), WORKS),
    ("Parquet: folders key=value", hive, WORKS),
    ("Parquet: ParquetLoader", lambda path: ParquetLoader(parquet(path), {"X": PREDICTORS, "y": "y", "clinic": "clinic"}), WORKS),
    ("Parquet: without a column", lambda path: ParquetLoader(parquet(path), {"X": ["height"]}), "no column 'height'"),
    ("Parquet: null", lambda path: parquet(path, dose=missing_at(X[:, 1], 59)), "1 in column 'dose'"),
    ("Parquet: drop_missing without any", lambda path: ParquetLoader(parquet(path), {"X": PREDICTORS, "y": "y", "clinic": "clinic"}, drop_missing=True), WORKS),
    ("Parquet: categories", lambda path: parquet(path, clinic=pd.Categorical(NAMES)), WORKS),
    ("Parquet: decimals", lambda path: parquet(path, y=list(map(decimal.Decimal, Y.astype(int).tolist()))), WORKS),
    ("Parquet: times", lambda path: parquet(path, y=[datetime.datetime(2020, 1, 1)] * N), "holds dates or times"),
    ("Parquet: times in a matrix", lambda path: parquet(path, dose=[datetime.datetime(2020, 1, 1)] * N), "'dose'.*holds dates or times"),
    ("Parquet: text in a matrix", lambda path: parquet(path, dose=["much"] * N), "'dose'.*holds text"),
    ("Parquet: no rows", lambda path: no_rows(path), r"ParquetLoader\(\S*rows\.parquet.* has a length of 0"),
    ("Parquet: damaged", lambda path: damaged(path), r"the file \S*rows\.parquet can't be read\. Is it damaged"),
    ("Parquet: lists", lambda path: parquet(path, y=[[1.0, 2.0]] * N), "holds objects"),
    ("Parquet: no file", lambda path: path / "none.parquet", "no file or folder"),
    ("Parquet: an address", lambda path: parquet(path).as_uri(), WORKS),
    ("Parquet: an object store", in_a_store, WORKS),
    ("Parquet: no file in a store", lambda path: pytest.importorskip("fsspec") and "memory://none.parquet", "no file or folder"),
    ("Parquet: an address of an unknown kind", lambda path: pytest.importorskip("fsspec") and "foo://rows.parquet", r"data=: the address 'foo://rows.parquet' can't be opened \(.*foo"),
    ("Parquet: a list of paths", parts, WORKS),
    ("Parquet: a tuple of paths", lambda path: tuple(parts(path)), WORKS),
    ("Parquet: a list, one is no file", lambda path: [*parts(path), "none.parquet"], "no file or folder 'none.parquet'"),
    ("Parquet: a column in no file", lambda path: ParquetLoader(parts(path), {"X": ["height"]}), "no column 'height'"),
    ("Parquet: a path without a column", lambda path: parts(path, dose=None)[1], r"the data at \S*second\.parquet has no 'dose'"),
    ("Parquet: a later file without a column", lambda path: parts(path, dose=None)[0] and path, r"the file \S*second\.parquet has no column 'dose', which other files have"),
    ("Parquet: a later file with null", lambda path: parts(path, y=missing_at(Y[20:], 3))[0] and path, r"the file \S*second\.parquet has missing values \(1 in column 'y'"),
    ("a CSV file", csv, "isn't a file of Parquet data"),
    ("Dask: an array", lambda path: dask(lambda da, dd: with_(y=da.from_array(Y, chunks=7))), WORKS),
    ("Dask: arrays in other chunks", lambda path: dask(lambda da, dd: {"X": da.from_array(X, chunks=(11, 1)), "y": da.from_array(Y, chunks=7), "clinic": da.from_array(CLINIC, chunks=N)}), WORKS),
    ("Dask: a frame", lambda path: dask(lambda da, dd: dd.from_pandas(frame(), npartitions=2)), WORKS),
    ("Dask: columns, text in memory", lambda path: dask(lambda da, dd: {"X": dd.from_pandas(frame(), npartitions=4)[PREDICTORS], "y": da.from_array(Y, chunks=7), "clinic": frame()["clinic"]}), WORKS),
    ("Dask: columns in another order", lambda path: dask(lambda da, dd: with_(X=dd.from_pandas(frame(), npartitions=4)[PREDICTORS[::-1]])), WORKS),
    ("Dask: a frame, filtered", lambda path: dask(lambda da, dd: dd.concat([d := dd.from_pandas(frame(), npartitions=3), d[d["y"] > 100]])), WORKS),
    ("Dask: xarray", lambda path: dask(lambda da, dd: with_(X=xr.DataArray(da.from_array(X, chunks=(13, 2)), dims=("row", "predictor")))), WORKS),
    ("Dask: an xarray dataset", lambda path: dask(lambda da, dd: xr.Dataset({"X": (("row", "predictor"), da.from_array(X, chunks=(13, 2))), "y": ("row", Y), "clinic": ("row", CLINIC)})), WORKS),
    ("Dask: an xarray dataset of columns", lambda path: dask(lambda da, dd: xr.Dataset({name: ("row", da.from_array(values, chunks=7)) for name, values in {"dose": X[:, 1], "age": X[:, 0], "y": Y, "clinic": CLINIC}.items()})), WORKS),
    ("Dask: xarray, columns in another order", lambda path: dask(lambda da, dd: with_(X=xr.DataArray(da.from_array(X[:, ::-1], chunks=(13, 1)), dims=("row", "predictor"), coords={"predictor": PREDICTORS[::-1]}))), WORKS),
    ("Dask: xarray, dims in another order", lambda path: dask(lambda da, dd: with_(X=xr.DataArray(da.from_array(X.T, chunks=(2, 13)), dims=("predictor", "row")))), WORKS),
    ("Dask: beside xarray in memory, columns in another order", lambda path: dask(lambda da, dd: with_(y=da.from_array(Y, chunks=7), X=xr.DataArray(X[:, ::-1], dims=("row", "predictor"), coords={"predictor": PREDICTORS[::-1]}))), WORKS),
    ("Dask: beside Arrow, columns in another order", lambda path: dask(lambda da, dd: with_(y=da.from_array(Y, chunks=7), X=pytest.importorskip("pyarrow").table({"dose": X[:, 1], "age": X[:, 0]}))), WORKS),
    ("Dask: beside Polars, columns in another order", lambda path: dask(lambda da, dd: with_(y=da.from_array(Y, chunks=7), X=pytest.importorskip("polars").DataFrame({"dose": X[:, 1], "age": X[:, 0]}))), WORKS),
    ("Dask: DaskLoader without Dask", lambda path: dask(lambda da, dd: DaskLoader(ROWS)), "DaskLoader: pass Dask arrays"),
    ("Dask: a client's address", lambda path: dask(lambda da, dd: DaskLoader(with_(y=da.from_array(Y)), client="tcp://10.0.0.1:8786")), "pass a distributed.Client"),
    ("Dask: missing values", lambda path: dask(lambda da, dd: dd.from_pandas(frame(y=np.where(Y == 3, np.nan, Y)), npartitions=2)), "'y' has missing values"),
    ("Dask: another number of rows", lambda path: dask(lambda da, dd: with_(y=da.from_array(Y[:-1], chunks=7))), "'X' has 60 rows, and .* 59"),
    ("Dask: a bag", lambda path: dask(lambda da, dd: pytest.importorskip("dask.bag").from_sequence(range(9))), "without rows, of type Bag. Pass Dask arrays"),
    ("Dask: a sum", lambda path: dask(lambda da, dd: with_(y=da.from_array(Y, chunks=7).sum())), "with an entry for each row"),
    # Loaders
    ("a generator", lambda path: (ROWS for _ in range(2)), "a generator gives no second one"),
    ("an iterator of frames", lambda path: iter([frame()]), "a generator gives no second one"),
    ("a torch data set", lambda path: type("Dataset", (), {"__getitem__": None, "__len__": lambda self: N})(), "Dataset, which has no rows to read.*DataLoader"),
    ("loader: rows from n_rows", lambda path: NRows(dict, dataset=range(3)), WORKS),
    ("loader: dicts", batches(dict), WORKS),
    ("loader: lists of tensors", batches(as_tensors), WORKS),
    ("loader: tuples", batches(lambda rows: tuple(rows.values())), WORKS),
    ("loader: tuples of two", batches(lambda rows: (rows["X"], rows["y"])), "yields tuples of 2.*'X', 'y', 'clinic'"),
    ("loader: frames", batches(as_frame), WORKS),
    ("loader: text with coords", batches(lambda rows: {**rows, "clinic": np.array(CLINICS)[rows["clinic"]]}), WORKS),
    ("loader: strings", batches(lambda rows: "a line"), "the loader yields str. Blocks must be"),
    ("loader: text for numbers", batches(lambda rows: {**rows, "y": rows["y"].astype(str)}), "in a block 'y' holds text"),
    ("loader: missing values", batches(lambda rows: {**rows, "y": np.where(rows["y"] == 0, np.nan, rows["y"])}), "in a block 'y' has missing values"),
    ("loader: types that grow", batches(lambda rows: {**rows, "y": rows["y"].astype("i4") if rows["y"][0] < 6 else np.array([2**40])}, size=1), "first block has dtype"),
    ("loader: no number of rows", lambda path: Batches(dict, dataset=3).__iter__, "method, which has no rows"),
]  # fmt: skip


def taken(data):
    """Return the rows that a step would read of data, by container."""
    data = known_form(data, CONTAINERS)
    if isinstance(data, dict):
        return given_arrays(CONTAINERS, data)
    source = Source(data, CONTAINERS)
    blocks = list(source.blocks(np.random.default_rng(0)))
    assert sum(len(block["y"]) for block in blocks) == len(source.containers["y"].shape) * N
    return {name: np.concatenate([block[name] for block in blocks]) for name in source.names}


def in_order(rows):
    """Rows sorted, as blocks may come in any order."""
    table = np.column_stack([rows["X"], rows["y"], rows["clinic"]]).astype(float)
    return table[np.lexsort(table.T)]


@pytest.mark.parametrize(("form", "make", "outcome"), FORMS, ids=[form for form, *_ in FORMS])
def test_a_form_works_or_is_refused_in_words(form, make, outcome, tmp_path):
    data = make(tmp_path) if not isinstance(outcome, str) or outcome == WORKS else None
    if data is None:
        with pytest.raises(ValueError, match=outcome) as refusal:
            taken(make(tmp_path))
        assert "\n" not in str(refusal.value) or form == "a CSV file"
        return
    expected = ROWS if isinstance(outcome, str) else with_(y=outcome)
    rows = taken(data)
    assert all(array.dtype.isnative and array.dtype.kind in "biuf" for array in rows.values())
    np.testing.assert_array_equal(in_order(rows), in_order(expected))


WAYS = {
    "a frame": lambda path: frame(),
    "a file": parquet,
    "batches": lambda path: Batches(as_tensors),
    "text": lambda path: with_(clinic=NAMES),
}


@pytest.fixture(scope="module")
def exact():
    """The gradient from arrays."""
    return gradient_of(MODEL, 20, data=ROWS, compile_kwargs=FAST)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_those_from_arrays(way, exact, tmp_path):
    gradient = gradient_of(MODEL, 20, data=WAYS[way](tmp_path), compile_kwargs=FAST)
    position = np.array([0.1, -0.2, 0.3, -0.4, 0.5])
    for ours, expected in zip(
        gradient.passes.likelihood(position), exact.passes.likelihood(position), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_one_array_needs_no_name_in_a_model_of_one_container():
    with pm.Model() as model:
        mu = pm.Normal("mu")
        pm.Normal("likelihood", mu, 1, observed=pm.Data("outcome", Y[:5]))
    containers = containers_of(model)
    for data in (Y, pd.Series(Y), xr.DataArray(Y)):
        rows = given_arrays(containers, known_form(data, containers))
        np.testing.assert_array_equal(rows["outcome"], Y)


def test_a_code_of_a_missing_category_is_warned_of():
    with pytest.warns(UserWarning, match=r"'clinic' has the value -1 in 1 rows"):
        given_arrays(
            containers_of(small_model()), with_(clinic=np.where(np.arange(N) == 7, -1, CLINIC))
        )


def test_an_index_beyond_the_groups_is_refused_in_words():
    rows = with_(clinic=np.where(np.arange(N) == N - 1, 9, CLINIC))
    with small_model(), pytest.raises(ValueError, match=r"index 9 is out of bounds .*cat\.codes"):
        SGHMC(batch_size=10, data=rows)


def test_text_that_two_coords_have_at_different_places_is_refused():
    with pm.Model(coords={"here": CLINICS, "there": CLINICS[::-1]}) as model:
        pm.Data("group", CLINIC[:5])
    containers = containers_of(model)
    with pytest.raises(ValueError, match=r"several coords of the model have.*'here', 'there'"):
        given_arrays(containers, {"group": NAMES})
    with pm.Model(coords={"here": CLINICS, "other": [*CLINICS, "abroad"]}) as model:
        pm.Data("group", CLINIC[:5])
    rows = given_arrays(containers_of(model), {"group": NAMES})  # the same places in both
    np.testing.assert_array_equal(rows["group"], CLINIC)


def test_containers_of_other_rows_are_none_of_the_frame():
    with MODEL.copy() as model:
        pm.Data("knots", np.arange(3.0))
    assert set(known_form(frame(), containers_of(model))) == set(ROWS)


def test_a_stream_counts_as_checked_after_one_full_pass():
    source = Source(Batches(as_tensors), CONTAINERS)
    blocks = source.blocks(np.random.default_rng(0))
    for block in blocks:
        assert len(block["y"])
        assert not source.is_checked
    assert source.is_checked


def test_a_missing_value_late_in_a_stream_is_named():
    late = np.where(np.arange(N) == N - 1, np.nan, Y)
    loader = ArrayLoader(with_(y=late), block_rows=7)
    with pytest.raises(ValueError, match=r"in a block 'y' has missing values \(1\)"):
        list(Source(loader, CONTAINERS).blocks(np.random.default_rng(0)))
