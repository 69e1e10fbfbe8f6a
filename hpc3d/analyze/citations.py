"""Papers to cite for the schemes, schedules and techniques that a run uses, as BibTeX."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from hpc3d.config.input_file import Config
from hpc3d.config.load import stored


class Paper(NamedTuple):
    """Paper that describes a technique; `used(config)` is true if a run uses this technique.

    `where` is the BibTeX fields of the publication; `arxiv` is its number on arXiv, or "".
    """

    key: str
    authors: str
    title: str
    year: int
    arxiv: str
    used: Callable[[Config], bool]
    where: str = ""

    def bibtex(self) -> str:
        """Return the BibTeX entry."""
        fields = [f"author = {{{self.authors}}}", f"title = {{{{{self.title}}}}}"]
        fields += [f"year = {{{self.year}}}"]
        if self.arxiv:
            fields += [f"eprint = {{{self.arxiv}}}", "archivePrefix = {arXiv}"]
        fields += [self.where] if self.where else []
        kind = "article" if self.where.startswith("journal") else "misc"
        return ",\n  ".join([f"@{kind}{{{self.key}", *fields]) + "\n}"


def _scheme(*names: str) -> Callable[[Config], bool]:
    return lambda config: (
        config.parallel.scheme in names
        and any((size or 1) > 1 for size in (config.mesh.x, config.mesh.y, config.mesh.z))
        and not config.parallel.split
    )


def _schedule(*names: str) -> Callable[[Config], bool]:
    return lambda config: config.mesh.p > 1 and config.parallel.schedule in names


def _optimizer(*names: str) -> Callable[[Config], bool]:
    return lambda config: config.train.optimizer in names


def _experts(*kinds: int) -> Callable[[Config], bool]:
    return lambda config: config.model.experts > 0 and config.model.top_k in kinds


PAPERS = (
    Paper(
        "bian2021",
        "Bian, Zhengda and Xu, Qifan and Wang, Boxiang and You, Yang",
        "Maximizing Parallelism in Distributed Training for Huge Neural Networks",
        2021,
        "2105.14450",
        _scheme("3d", "3d-broadcast"),
    ),
    Paper(
        "agarwal1995",
        "Agarwal, R. C. and Balle, S. M. and Gustavson, F. G. and Joshi, M. and Palkar, P.",
        "A three-dimensional approach to parallel matrix multiplication",
        1995,
        "",
        _scheme("3d-broadcast"),
        "journal = {IBM Journal of Research and Development},\n  volume = {39},\n  number = {5},\n"
        "  pages = {575--582}",
    ),
    Paper(
        "wang2021",
        "Wang, Boxiang and Xu, Qifan and Bian, Zhengda and You, Yang",
        "Tesseract: Parallelize the Tensor Parallelism Efficiently",
        2021,
        "2105.14500",
        _scheme("2.5d"),
    ),
    Paper(
        "xu2021",
        "Xu, Qifan and Li, Shenggui and Gong, Chaoyu and You, Yang",
        "An Efficient 2D Method for Training Super-Large Deep Learning Models",
        2021,
        "2104.05343",
        _scheme("2d", "2d-summa"),
    ),
    Paper(
        "shoeybi2019",
        "Shoeybi, Mohammad and Patwary, Mostofa and Puri, Raul and LeGresley, Patrick and "
        "Casper, Jared and Catanzaro, Bryan",
        "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
        2019,
        "1909.08053",
        _scheme("1d", "1d-sequence"),
    ),
    Paper(
        "korthikanti2022",
        "Korthikanti, Vijay and Casper, Jared and Lym, Sangkug and McAfee, Lawrence and "
        "Andersch, Michael and Shoeybi, Mohammad and Catanzaro, Bryan",
        "Reducing Activation Recomputation in Large Transformer Models",
        2022,
        "2205.05198",
        _scheme("1d-sequence"),
    ),
    Paper(
        "huang2018",
        "Huang, Yanping and Cheng, Youlong and Bapna, Ankur and Firat, Orhan and Chen, Mia Xu and "
        "Chen, Dehao and Lee, HyoukJoong and Ngiam, Jiquan and Le, Quoc V. and Wu, Yonghui and "
        "Chen, Zhifeng",
        "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
        2018,
        "1811.06965",
        _schedule("gpipe"),
    ),
    Paper(
        "harlap2018",
        "Harlap, Aaron and Narayanan, Deepak and Phanishayee, Amar and Seshadri, Vivek and "
        "Devanur, Nikhil and Ganger, Greg and Gibbons, Phil",
        "PipeDream: Fast and Efficient Pipeline Parallel DNN Training",
        2018,
        "1806.03377",
        _schedule("1f1b", "pipedream"),
    ),
    Paper(
        "narayanan2020",
        "Narayanan, Deepak and Phanishayee, Amar and Shi, Kaiyu and Chen, Xie and Zaharia, Matei",
        "Memory-Efficient Pipeline-Parallel DNN Training",
        2020,
        "2006.09503",
        _schedule("1f1b", "pipedream-2bw"),
    ),
    Paper(
        "narayanan2021",
        "Narayanan, Deepak and Shoeybi, Mohammad and Casper, Jared and LeGresley, Patrick and "
        "Patwary, Mostofa and Korthikanti, Vijay Anand and Vainbrand, Dmitri and "
        "Kashinkunti, Prethvi and Bernauer, Julie and Catanzaro, Bryan and Phanishayee, Amar and "
        "Zaharia, Matei",
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
        2021,
        "2104.04473",
        _schedule("interleaved"),
    ),
    Paper(
        "qi2023",
        "Qi, Penghui and Wan, Xinyi and Huang, Guangxing and Lin, Min",
        "Zero Bubble Pipeline Parallelism",
        2023,
        "2401.10241",
        _schedule("zb-h1", "zb-h2", "zb-v"),
    ),
    Paper(
        "qi2024",
        "Qi, Penghui and Wan, Xinyi and Amar, Nyamdavaa and Lin, Min",
        "Pipeline Parallelism with Controllable Memory",
        2024,
        "2405.15362",
        _schedule("v-half", "v-min"),
    ),
    Paper(
        "deepseek2024",
        "{DeepSeek-AI}",
        "DeepSeek-V3 Technical Report",
        2024,
        "2412.19437",
        _schedule("dualpipe-v"),
    ),
    Paper(
        "rajbhandari2019",
        "Rajbhandari, Samyam and Rasley, Jeff and Ruwase, Olatunji and He, Yuxiong",
        "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        2019,
        "1910.02054",
        lambda config: config.parallel.zero > 0,
    ),
    Paper(
        "liu2023",
        "Liu, Hao and Zaharia, Matei and Abbeel, Pieter",
        "Ring Attention with Blockwise Transformers for Near-Infinite Context",
        2023,
        "2310.01889",
        lambda config: config.context().rings > 1,
    ),
    Paper(
        "jacobs2023",
        "Jacobs, Sam Ade and Tanaka, Masahiro and Zhang, Chengming and Zhang, Minjia and "
        "Song, Shuaiwen Leon and Rajbhandari, Samyam and He, Yuxiong",
        "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence "
        "Transformer Models",
        2023,
        "2309.14509",
        lambda config: config.context().heads > 1,
    ),
    Paper(
        "fedus2021",
        "Fedus, William and Zoph, Barret and Shazeer, Noam",
        "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient "
        "Sparsity",
        2021,
        "2101.03961",
        _experts(1),
    ),
    Paper(
        "lepikhin2020",
        "Lepikhin, Dmitry and Lee, HyoukJoong and Xu, Yuanzhong and Chen, Dehao and "
        "Firat, Orhan and Huang, Yanping and Krikun, Maxim and Shazeer, Noam and Chen, Zhifeng",
        "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
        2020,
        "2006.16668",
        _experts(2),
    ),
    Paper(
        "vogels2019",
        "Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin",
        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        2019,
        "1905.13727",
        lambda config: config.parallel.compression == "powersgd",
    ),
    Paper(
        "stich2018",
        "Stich, Sebastian U. and Cordonnier, Jean-Baptiste and Jaggi, Martin",
        "Sparsified SGD with Memory",
        2018,
        "1809.07599",
        lambda config: config.parallel.compression == "top-k",
    ),
    Paper(
        "loshchilov2017",
        "Loshchilov, Ilya and Hutter, Frank",
        "Decoupled Weight Decay Regularization",
        2017,
        "1711.05101",
        _optimizer("adamw", "adamw-8bit", "muon"),
    ),
    Paper(
        "dettmers2021",
        "Dettmers, Tim and Lewis, Mike and Shleifer, Sam and Zettlemoyer, Luke",
        "8-bit Optimizers via Block-wise Quantization",
        2021,
        "2110.02861",
        _optimizer("adamw-8bit"),
    ),
    Paper(
        "shazeer2018",
        "Shazeer, Noam and Stern, Mitchell",
        "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
        2018,
        "1804.04235",
        _optimizer("adafactor"),
    ),
    Paper(
        "chen2023",
        "Chen, Xiangning and Liang, Chen and Huang, Da and Real, Esteban and Wang, Kaiyuan and "
        "Liu, Yao and Pham, Hieu and Dong, Xuanyi and Luong, Thang and Hsieh, Cho-Jui and "
        "Lu, Yifeng and Le, Quoc V.",
        "Symbolic Discovery of Optimization Algorithms",
        2023,
        "2302.06675",
        _optimizer("lion"),
    ),
    Paper(
        "jordan2024",
        "Jordan, Keller and Jin, Yuchen and Boza, Vlado and You, Jiacheng and Cesista, Franz and "
        "Newhouse, Laker and Bernstein, Jeremy",
        "Muon: An optimizer for hidden layers in neural networks",
        2024,
        "",
        _optimizer("muon"),
        "url = {https://kellerjordan.github.io/posts/muon/}",
    ),
    Paper(
        "liu2025",
        "Liu, Jingyuan and Su, Jianlin and Yao, Xingcheng and Jiang, Zhejun and Lai, Guokun and "
        "Du, Yulun and Qin, Yidao and Xu, Weixin and Lu, Enzhe and Yan, Junjie and "
        "Chen, Yanru and Zheng, Huabin and Liu, Yibo and Liu, Shaowei and Yin, Bohong and "
        "He, Weiran and Zhu, Han and Wang, Yuzhi and Wang, Jianzhou and Dong, Mengnan and "
        "Zhang, Zheng and Kang, Yongsheng and Zhang, Hao and Xu, Xinran and Zhang, Yutao and "
        "Wu, Yuxin and Zhou, Xinyu and Yang, Zhilin",
        "Muon is Scalable for LLM Training",
        2025,
        "2502.16982",
        _optimizer("muon"),
    ),
)


def bibliography(configs: Iterable[str]) -> str:
    """Return the BibTeX entries of all papers that runs use, given their configurations as TOML.

    A configuration that is missing or invalid, as in a damaged trace, is skipped.
    """
    known = []
    for text in filter(str.strip, configs):
        with suppress(ValueError, TypeError):
            known.append(stored(text))
    used = [paper for paper in PAPERS if any(map(paper.used, known))]
    return "\n\n".join(paper.bibtex() for paper in used)
