"""hpc3d for Spack, from a clone (docs/clusters.md); the bounds are those of setup.cfg."""

from spack.package import default_args, depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpc3d(PythonPackage):
    """Training Transformers on a cube of MPI ranks: 1-D, 2-D, 2.5-D and 3-D tensor parallelism."""

    license("MIT")

    version("0.2.0")

    variant("parquet", default=False, description="Text from parquet files")
    variant("exact", default=False, description="The error function of the exact GELU")
    variant("tensorboard", default=False, description="Metrics for TensorBoard")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-numpy@2.0:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-h5py@3.10:")
        depends_on("py-pydantic@2.6:")
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-greenlet@3:")
        depends_on("py-bokeh@3.6:")
        depends_on("py-jinja2@3.1:")
        depends_on("py-matplotlib@3.8:")
        depends_on("py-networkx@3:")
        depends_on("py-pandas@2.2.2:")
        depends_on("py-safetensors@0.5:")
        depends_on("py-tokenizers@0.20:")

    with default_args(type="run"):
        depends_on("py-pyarrow@16:", when="+parquet")
        depends_on("py-scipy@1.11:", when="+exact")
        depends_on("py-tensorboardx@2.6.2:", when="+tensorboard")
