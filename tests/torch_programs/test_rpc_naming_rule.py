"""What a name can reach: the functions of the program, and nothing that a hostile peer wants."""

import collections
import ctypes
import dataclasses
import enum
import functools
import multiprocessing.util
import os
import pathlib
import subprocess
import sys
import types
from os import system

import numpy
import pytest

from rankwire.errors import ConfigurationError

torch = pytest.importorskip("torch")

from rankwire.torch.rpc.functions import (  # noqa: E402
    _exposed,
    async_execution,
    exposed,
    is_exposed,
)
from rankwire.torch.rpc.guards import find_method, guarded  # noqa: E402
from rankwire.torch.rpc.listed_functions import LAYERS, make_layer  # noqa: E402
from rankwire.torch.rpc.naming_rule import NameRefusedError, NamingRule, name_of  # noqa: E402

HERE = __name__


def plain(x):
    return x


def _single_underscore():
    return 1


def __dunder__():
    return 2


@functools.wraps(plain)
def dressed_up(*args):
    return plain(*args)


@functools.lru_cache
def cached(x):
    return x


@async_execution
def later():
    return torch.futures.Future()


class Program:
    alias = os.system
    static_alias = staticmethod(os.system)
    attribute = 1
    nested_class = subprocess.Popen

    class Inner:
        def method(self):
            return "inner"

    def method(self):
        return "method"

    def _private(self):
        return "private"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def make(cls):
        return cls

    @property
    def armed(self):
        raise AssertionError("a property ran")


class Heir(Program):
    pass


class _Private:
    class Inner:
        pass


class Shell(subprocess.Popen):
    pass


class Mapped(numpy.memmap):
    def __init__(self, *args):
        pass


class Odd(metaclass=type("Meta", (type,), {"__module__": "library", "__call__": os.system})):
    pass


class Layer(torch.nn.Linear):
    pass


class Model(torch.nn.Module):
    pass


class Row(dict):
    pass


class Config(dict):
    def __init__(self, rate, *, steps):
        super().__init__(rate=rate, steps=steps)


class Color(enum.Enum):
    RED = 1


class Problem(ValueError):
    pass


@dataclasses.dataclass
class Point:
    x: int = 0


class Pair(collections.namedtuple("PairBase", "a b")):
    pass


class Meta(type):
    def __getattr__(cls, name):
        raise AssertionError("a metaclass was asked")


class WithMeta(metaclass=Meta):
    pass


class Callable_:
    def __call__(self):
        raise AssertionError("an object was called")


called = Callable_()
partial = functools.partial(os.system, "true")
popen = subprocess.Popen
libc = ctypes.CDLL(None)
remembered = functools.lru_cache(os.system)
also_plain = plain


def rule(*allow):
    return NamingRule(allow or [HERE])


@pytest.mark.parametrize(
    "target",
    [
        plain,
        cached,
        later,
        Program,
        Program.Inner,
        Program.static,
        min,
        torch.add,
        torch.matmul,
        torch.nn.Linear,
        torch.nn.Embedding,
        torch.nn.LSTM,
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_function_of_the_program_is_found_by_its_own_name(target):
    assert rule().find(name_of(target)) is target


def test_a_class_method_is_found_bound_to_the_class_that_was_meant():
    assert rule().find(name_of(Program.make))() is Program
    assert rule().find(name_of(Heir.make))() is Heir


def test_a_method_of_a_class_is_found_as_the_function_that_it_is():
    assert rule().find(name_of(Program.method))(Program()) == "method"
    assert rule().find(name_of(Program.Inner.method))(Program.Inner()) == "inner"


def test_main_is_the_same_module_in_a_spawned_process(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[HERE])
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setattr(plain, "__module__", name)
        assert name_of(plain) == "__main__:plain"
        assert NamingRule().find("__main__:plain") is plain


def test_what_is_replaced_in_its_module_is_found_anew(monkeypatch):
    one = rule()
    assert one.find(f"{HERE}:plain") is plain

    def new():
        return 1

    new.__qualname__ = "plain"
    monkeypatch.setattr(sys.modules[HERE], "plain", new)
    assert one.find(f"{HERE}:plain") is new
    monkeypatch.delattr(sys.modules[HERE], "plain")
    with pytest.raises(NameRefusedError, match="RPC pickler does not serialize"):
        one.find(f"{HERE}:plain")


def module_that_works(monkeypatch, name):
    module = types.ModuleType(name)
    module.work = types.FunctionType(plain.__code__, vars(module), "work")
    module.work.__module__, module.work.__qualname__ = name, "work"
    monkeypatch.setitem(sys.modules, name, module)
    return module


def check_that_work_is_found(module, is_found):
    name = f"{module.__name__}:work"
    if is_found:
        assert NamingRule().find(name) is module.work
    else:
        with pytest.raises(NameRefusedError, match="not one of the program's"):
            NamingRule().find(name)


def test_a_file_beside_the_program_is_the_programs(monkeypatch, tmp_path):
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for folder, is_found in ((tmp_path, True), (tmp_path / "lib", False)):
        beside = module_that_works(monkeypatch, "beside")
        beside.__file__ = str(folder / "beside.py")
        check_that_work_is_found(beside, is_found)


def test_the_package_of_the_program_is_the_programs(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for package, is_found in (("mine.train", True), ("torch.testing", False), ("other", False)):
        main.__spec__ = types.SimpleNamespace(parent=package)
        check_that_work_is_found(module_that_works(monkeypatch, "mine.model"), is_found)


ATTACKS = {
    "an import of the module": f"{HERE}:system",
    "a module of the module": f"{HERE}:os.system",
    "a class that was imported": f"{HERE}:subprocess",
    "another name of a class": f"{HERE}:popen",
    "another name in a class": f"{HERE}:Program.alias",
    "a static alias": f"{HERE}:Program.static_alias",
    "a class as an attribute": f"{HERE}:Program.nested_class",
    "a private function": f"{HERE}:_single_underscore",
    "a private method": f"{HERE}:Program._private",
    "a class in a private class": f"{HERE}:_Private.Inner",
    "a constructor of a library": f"{HERE}:Shell",
    "a constructor of a library, by __new__": f"{HERE}:Mapped",
    "a constructor of a library, by its metaclass": f"{HERE}:Odd",
    "a class that makes classes": f"{HERE}:Meta",
    "the constructor by its name": f"{HERE}:Program.__init__",
    "pickle's way": f"{HERE}:Program.__reduce__",
    "the class's dictionary": f"{HERE}:Program.__dict__",
    "subclasses": f"{HERE}:Program.__subclasses__",
    "the base": f"{HERE}:Program.__base__",
    "the metaclass": f"{HERE}:Program.mro",
    "a metaclass's __getattr__": f"{HERE}:WithMeta.anything",
    "a property": f"{HERE}:Program.armed",
    "an attribute": f"{HERE}:Program.attribute",
    "globals of a function": f"{HERE}:plain.__globals__",
    "what a function wraps": f"{HERE}:dressed_up.__wrapped__",
    "the code of a function": f"{HERE}:plain.__code__",
    "a dunder of the module": f"{HERE}:__dunder__",
    "the module's builtins": f"{HERE}:__builtins__",
    "the module's loader": f"{HERE}:__loader__.exec_module",
    "a partial": f"{HERE}:partial",
    "an object that can be called": f"{HERE}:called",
    "a library of C": f"{HERE}:libc.system",
    "a cached import": f"{HERE}:remembered",
    "another name of a function": f"{HERE}:also_plain",
    "a function that says it is another": f"{HERE}:dressed_up",
    "a local function": f"{HERE}:rule.<locals>.plain",
    "a lambda": f"{HERE}:<lambda>",
    "eval": "builtins:eval",
    "exec": "builtins:exec",
    "compile": "builtins:compile",
    "open": "builtins:open",
    "getattr": "builtins:getattr",
    "import": "builtins:__import__",
    "type": "builtins:type",
    "vars": "builtins:vars",
    "breakpoint": "builtins:breakpoint",
    "a format, which reads attributes": "builtins:str.format",
    "os.system": "os:system",
    "posix.system": "posix:system",
    "a process": "subprocess:Popen",
    "shutil": "shutil:rmtree",
    "pickle": "pickle:loads",
    "torch's pickler": "torch.distributed.rpc.internal:_InternalRPCPickler.deserialize",
    "torch's function for it": "torch.distributed.rpc.internal:_run_function",
    "importlib": "importlib:import_module",
    "runpy": "runpy:run_path",
    "attrgetter": "_operator:attrgetter",
    "methodcaller": "_operator:methodcaller",
    "torch.load": "torch:load",
    "torch.save": "torch:save",
    "torch.serialization": "torch.serialization:load",
    "torch.hub": "torch.hub:load",
    "torch.ops": "torch:ops.aten.from_file",
    "load_library": "torch._ops:_Ops.load_library",
    "a file as a tensor": "torch:from_file",
    "memory as it was left": "torch:empty",
    "settings of torch": "torch:set_num_threads",
    "the default type of torch": "torch:set_default_dtype",
    "extensions": "torch.utils.cpp_extension:load_inline",
    "a layer by another name": "torch.nn:Linear",
    "a layer that torch.nn does not export": (
        "torch.nn.modules.linear:NonDynamicallyQuantizableLinear"
    ),
    "a method of a layer": "torch.nn.modules.linear:Linear.forward",
    "a class method of a layer": "torch.nn.modules.sparse:Embedding.from_pretrained",
    "hooks of a layer": "torch.nn.modules.linear:Linear.register_forward_hook",
    "compiling a layer": "torch.nn.modules.linear:Linear.compile",
    "what a module of layers imports": "torch.nn.modules.linear:init",
    "functions beside layers": "torch.nn.modules.transformer:_get_clones",
    "hooks of all modules": "torch.nn.modules.module:register_module_forward_hook",
    "the base of all modules": "torch.nn.modules.module:Module",
    "attributes by any name": "torch.nn.modules.container:ParameterDict",
    "modules by any name": "torch.nn.modules.container:Container",
    "a list of modules": "torch.nn.modules.container:Sequential",
    "copies of what is given": "torch.nn.modules.transformer:TransformerEncoder",
    "memory as it was left, in a layer": "torch.nn.modules.linear:LazyLinear",
    "collectives of the program": "torch.nn.modules.batchnorm:SyncBatchNorm",
    "threads over devices": "torch.nn.parallel.data_parallel:DataParallel",
    "a group of its own": "torch.nn.parallel.distributed:DistributedDataParallel",
    "functions on layers": "torch.nn.utils.parametrize:register_parametrization",
    "numpy's files": "numpy:load",
    "numpy's functions": "numpy:sum",
    "a module that is not imported": "antigravity:fly",
    "rankwire itself": "rankwire.torch.rpc.termination:shutdown",
    "modules on other ranks": "rankwire.torch.rpc.remote_module:RemoteModule",
    "what a handle is of": "rankwire.torch.rpc.remote_module:RemoteModule._of",
    "no module": ":plain",
    "no name": f"{HERE}:",
    "no colon": f"{HERE}.plain",
    "two colons": f"{HERE}:plain:x",
    "an empty step": f"{HERE}:Program..static",
    "a blank": f"{HERE}:plain ",
    "a letter that looks alike": f"{HERE}:pl\u0430in",
    "a letter that is normalised": f"{HERE}:\uff50lain",
    "a null": f"{HERE}:plain\0",
    "a very long name": f"{HERE}:" + "a" * 5000,
    "a very long path": f"{HERE}:" + "Program." * 500,
}


@pytest.mark.parametrize("name", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_refused(name):
    with pytest.raises(NameRefusedError):
        rule().find(name)


def test_a_module_that_makes_attributes_is_not_asked_for_them(monkeypatch):
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail("the module was asked")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(NameRefusedError):
        NamingRule(["lazy"]).find("lazy:system")


def test_a_refusal_says_why_and_how_to_allow_it_on_purpose():
    with pytest.raises(NameRefusedError) as caught:
        NamingRule().find("shutil:copyfile")
    assert "module 'shutil' is not one of the program's" in caught.value.message
    assert "@rankwire.torch.rpc.exposed" in caught.value.message
    assert "allow=['shutil']" in caught.value.message


def test_an_alias_says_what_it_really_is():
    with pytest.raises(NameRefusedError, match=r"it is posix:system, which was not defined there"):
        rule().find(f"{HERE}:system")
    assert system is os.system


def test_a_module_is_allowed_with_those_in_it_and_not_with_those_beside_it():
    inner = multiprocessing.util.get_temp_dir
    assert NamingRule(["multiprocessing"]).find("multiprocessing.util:get_temp_dir") is inner
    assert NamingRule([HERE]).find(f"{HERE}:plain") is plain
    with pytest.raises(NameRefusedError):
        NamingRule([HERE[:-1]]).find(f"{HERE}:plain")


def test_one_function_is_allowed_and_no_other():
    for entry in (plain, f"{HERE}:plain"):
        one = NamingRule([entry])
        assert one.find(f"{HERE}:plain") is plain
        with pytest.raises(NameRefusedError):
            one.find(f"{HERE}:cached")


def test_what_is_exposed_is_found_wherever_it_is():
    @exposed
    def shown():
        return 1

    shown.__qualname__ = "shown"
    sys.modules[HERE].shown = shown
    try:
        for one in (NamingRule(), NamingRule("decorated")):
            assert one.find(f"{HERE}:shown") is shown
            with pytest.raises(NameRefusedError):
                one.find(f"{HERE}:plain")
    finally:
        del sys.modules[HERE].shown


def test_a_decorator_does_not_take_the_exposure_along():
    @exposed
    def shown():
        return 1

    @functools.wraps(shown)
    def wrapper():
        return shown()

    assert is_exposed(shown)
    assert not is_exposed(wrapper)


def test_only_functions_and_classes_are_exposed():
    for wrong in (1, "plain", partial, called):
        with pytest.raises(ConfigurationError):
            exposed(wrong)


@pytest.mark.parametrize("allow", ["everything", [1], ["not a module"], ["a:b:c d"]])
def test_allow_is_checked(allow):
    with pytest.raises(ConfigurationError):
        NamingRule(allow)


@pytest.mark.parametrize(
    "target",
    [lambda: 1, partial, called, Program().method, 3, "plain", libc],
    ids=["lambda", "partial", "object", "bound method", "number", "text", "library"],
)
def test_what_has_no_name_says_what_to_do(target):
    with pytest.raises(NameRefusedError, match=r"top of (a|its) module"):
        name_of(target)


def test_a_private_function_is_allowed_by_its_name_or_exposed():
    """The tutorials of torch have such: ``_call_method``, ``_run_trainer``."""
    name = f"{HERE}:_single_underscore"
    with pytest.raises(NameRefusedError, match="begins with an underscore") as caught:
        rule().find(name)
    assert f"allow=[{name!r}]" in caught.value.message
    for entry in (name, _single_underscore):
        assert NamingRule([entry]).find(name) is _single_underscore
    is_exposed_for_now = exposed(_single_underscore)
    try:
        assert rule().find(name) is is_exposed_for_now
    finally:
        _exposed.discard(_single_underscore)


@pytest.mark.parametrize("function", [torch.kron, torch.linalg.qr, torch.nn.functional.softmax])
def test_a_function_of_torch_that_is_not_in_the_table_is_found_if_it_is_allowed(function):
    name = name_of(function)
    with pytest.raises(NameRefusedError, match="not in the table") as caught:
        rule().find(name)
    assert f"allow=[{name!r}]" in caught.value.message
    for allow in (function, name, "torch"):
        assert NamingRule([allow]).find(name) is function


def test_a_layer_that_is_not_in_the_table_is_made_and_run_if_it_is_allowed():
    """As that of torch's tutorial of distributed embeddings."""
    name = name_of(torch.nn.EmbeddingBag)
    with pytest.raises(NameRefusedError, match="not in the table"):
        rule().find(name)
    allowing = NamingRule([torch.nn.EmbeddingBag])
    bag = allowing.find(name)(8, 2)
    assert find_method(allowing, bag, "__call__")(torch.tensor([[1, 2]])).shape == (1, 2)


def test_a_class_whose_constructor_is_a_librarys_is_made_if_it_is_allowed_by_itself():
    name = f"{HERE}:Shell"
    with pytest.raises(NameRefusedError, match=r"its constructor is that of subprocess\.Popen"):
        rule().find(name)
    assert NamingRule([name]).find(name) is Shell
    assert NamingRule([HERE, "subprocess"]).find(name) is Shell


@pytest.mark.parametrize(
    "cls", [Program, Heir, WithMeta, Layer, Model, Row, Config, Color, Problem, Point, Pair]
)
def test_a_class_is_made_by_a_constructor_of_the_program_or_one_that_is_known(cls):
    assert rule().find(name_of(cls)) is cls


def test_an_inherited_constructor_of_a_layer_or_container_is_given_checked_arguments():
    assert guarded(Layer)(2, 3)(torch.ones(1, 2)).shape == (1, 3)
    with pytest.raises(ValueError, match="at most"):
        guarded(Layer)(10**6, 10**6)
    assert guarded(Row)({1: 2}) == {1: 2}
    with pytest.raises(TypeError):
        guarded(Row)(range(10))
    for own in (Program, Config):
        assert guarded(own) is own


# What can be called on a module that is shared: it computes, or changes that module alone.
OF_A_LAYER = {
    *("__call__", "buffers", "children", "eval", "forward", "load_state_dict", "modules"),
    *("named_buffers", "named_children", "named_modules", "named_parameters", "parameters"),
    *("requires_grad_", "state_dict", "train", "zero_grad"),
}


def test_no_other_module_of_torch_can_be_made():
    for name, cls in vars(torch.nn).items():
        if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
            if cls in LAYERS.values():
                assert NamingRule().find(name_of(cls)) is cls
            else:
                with pytest.raises(NameRefusedError):
                    NamingRule().find(f"{cls.__module__}:{name}")


def test_layers_are_not_found_where_only_what_is_exposed_is():
    with pytest.raises(NameRefusedError, match='allow="decorated"'):
        NamingRule("decorated").find(name_of(torch.nn.Linear))


def test_no_method_of_a_layer_can_be_called_but_those_that_compute():
    for cls in LAYERS.values():
        bare = object.__new__(cls)
        torch.nn.Module.__init__(bare)
        for name in dir(cls):
            try:
                find_method(rule(), bare, name)
            except NameRefusedError:
                continue
            assert name in OF_A_LAYER, (cls, name)


def test_a_layer_is_not_made_of_classes_and_functions():
    for wrong in (torch.Tensor, Program, dict, torch.tanh, [torch.Tensor]):
        with pytest.raises(TypeError, match="takes numbers"):
            make_layer(torch.nn.Linear, 4, wrong)


def test_a_layer_is_made_as_ever():
    for cls, args in ((torch.nn.LSTM, (3, 4, 2)), (torch.nn.Embedding, (8, 2))):
        torch.manual_seed(1)
        expected = cls(*args).state_dict()
        torch.manual_seed(1)
        found = make_layer(cls, *args).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_chain_of_layers_can_be_run_if_each_of_them_can():
    chain = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), Layer(2, 2))
    assert find_method(rule(), chain, "forward")(torch.ones(1, 1, 4, 4)).shape == (1, 2, 2, 2)
    chain.append(torch.nn.Fold(2, 2))
    with pytest.raises(NameRefusedError):
        find_method(rule(), chain, "forward")


class Forgetful(torch.nn.Module):
    """Like the convolutions of some versions of torch, without inputs."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.empty(9))
        self.like = torch.nn.Parameter(torch.empty_like(self.bias))


def test_a_layer_does_not_show_memory_as_it_was_left():
    torch.use_deterministic_algorithms(True)  # fills it with what can be told
    try:
        assert Forgetful().bias.isnan().all()
        for parameter in make_layer(Forgetful).parameters():
            assert torch.equal(parameter, torch.zeros(9))
    finally:
        torch.use_deterministic_algorithms(False)


class Stored:
    def __init__(self):
        self.fn = os.system
        self.method = os.system

    def method(self):
        return 1

    def good(self):
        return 2

    @staticmethod
    def static():
        return 3

    alias = os.system
    lent = pathlib.Path.write_text

    @property
    def armed(self):
        raise AssertionError("a property ran")


METHOD_ATTACKS = {
    "a file of an array": (numpy.ones(2), "tofile"),
    "a pickle of an array": (numpy.ones(2), "dump"),
    "a path": (pathlib.Path("x"), "write_text"),
    "a path's end": (pathlib.Path("x"), "unlink"),
    "a format": ("{0.__class__}", "format"),
    "a format of a map": ("{x}", "format_map"),
    "the storage of a tensor": (torch.ones(2), "untyped_storage"),
    "the address of a tensor": (torch.ones(2), "data_ptr"),
    "a tensor as an array": (torch.ones(2), "numpy"),
    "memory as it was left": (torch.ones(2), "new_empty"),
    "a tensor made larger": (torch.ones(2), "resize_"),
    "another storage": (torch.ones(2), "set_"),
    "sizes that change while they are read": (torch.ones(2, 1), "t_"),
    "what lies beside a tensor": (torch.ones(2), "as_strided"),
    "what a sparse tensor relies on": (torch.eye(2).to_sparse(), "indices"),
    "functions on a tensor": (torch.ones(2), "apply_"),
    "a file as storage": (torch.UntypedStorage(8), "from_file"),
    "a module of Python": (os, "system"),
    "a function": (os.system, "__call__"),
    "a class": (subprocess.Popen, "__call__"),
    "a partial": (partial, "__call__"),
    "something stored in the object": (Stored(), "fn"),
    "something over a method": (Stored(), "method"),
    "something stored in the class": (Stored(), "alias"),
    "another class's method": (Stored(), "lent"),
    "a property": (Stored(), "armed"),
    "pickle's way": (Stored(), "__reduce__"),
    "the class": (Stored(), "__class__"),
    "attributes": (Stored(), "__getattribute__"),
    "the constructor": (Stored(), "__init__"),
    "the dictionary": (Stored(), "__dict__"),
    "a private method": (Program(), "_private"),
    "hooks of a module": (torch.nn.Linear(1, 1), "register_forward_hook"),
    "functions on a module": (torch.nn.Linear(1, 1), "apply"),
    "compiling": (torch.nn.Linear(1, 1), "compile"),
    "a module as memory was left": (torch.nn.Linear(1, 1), "to_empty"),
    "a module in shared memory": (torch.nn.Linear(1, 1), "share_memory"),
    "a module's attributes": (torch.nn.Linear(1, 1), "__setattr__"),
    "a module's state": (torch.nn.Linear(1, 1), "__setstate__"),
    "another module in it": (torch.nn.Linear(1, 1), "set_submodule"),
    "a class method of a layer": (torch.nn.Embedding(1, 1), "from_pretrained"),
}


@pytest.mark.parametrize(("value", "name"), METHOD_ATTACKS.values(), ids=METHOD_ATTACKS)
def test_an_attack_on_a_shared_object_is_refused(value, name):
    with pytest.raises((NameRefusedError, AttributeError)):
        find_method(rule(), value, name)


def test_no_method_of_torch_and_python_is_found_where_only_what_is_exposed_is():
    for value, name in ((torch.ones(2), "add"), ([1], "append"), (torch.nn.Linear(1, 1), "eval")):
        find_method(NamingRule(), value, name)
        with pytest.raises(NameRefusedError):
            find_method(NamingRule("decorated"), value, name)


def test_methods_check_the_arguments_before_torch_or_python_sees_them():
    with pytest.raises(TypeError, match="dense tensors"):
        find_method(rule(), torch.eye(2).to_sparse(), "add_")(1)
    with pytest.raises(TypeError, match="no argument 'out'"):
        find_method(rule(), torch.ones(2), "add")(1, out=torch.ones(1))
    with pytest.raises(TypeError, match="list or tuple"):
        find_method(rule(), [1], "extend")(range(10**9))
    with pytest.raises(TypeError, match="copies into the parameters"):
        find_method(rule(), torch.nn.Linear(1, 1), "load_state_dict")({}, assign=True)


def test_methods_of_the_programs_objects_are_found():
    assert find_method(rule(), Stored(), "good")() == 2
    assert find_method(rule(), Stored(), "static")() == 3
    assert find_method(rule(), Heir(), "make")() is Heir
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        find_method(rule(), Stored(), "missing")


def test_methods_of_others_objects_need_to_be_allowed():
    counter = collections.Counter("aab")
    with pytest.raises(NameRefusedError, match=r"allow=\['collections'\]"):
        find_method(rule(), counter, "most_common")
    assert find_method(NamingRule(["collections"]), counter, "most_common")(1) == [("a", 2)]


def hidden():
    return 1


first_hidden = hidden


def hidden():
    return 2


def test_a_function_whose_name_another_one_has_does_not_travel_by_it():
    """Pickle refuses it as well; else another rank would run the other one."""
    assert name_of(hidden) == f"{__name__}:hidden"
    with pytest.raises(NameRefusedError, match="is another function"):
        name_of(first_hidden)
    for function in (Program, Program.make, Program.method, Stored.good, torch.add, len):
        assert ":" in name_of(function)


def test_a_class_of_a_package_has_methods_of_modules_in_it():
    """Of packages that rename their classes, or decorate methods that they inherit (torchrl)."""
    methods = {"sample": types.FunctionType(Stored.good.__code__, {}, "sample")}
    methods["sample"].__module__ = "package.inner"
    buffer = type("Buffer", (), {**methods, "__module__": "package"})()
    assert find_method(NamingRule(["package"]), buffer, "sample")() == 2
    for allow in (["package.inner"], [f"package:{type(buffer).__qualname__}"], "decorated"):
        with pytest.raises(NameRefusedError):
            find_method(NamingRule(allow), buffer, "sample")


def test_with_pickle_all_methods_are_found():
    anything = NamingRule(anything=True)
    assert find_method(anything, Program(), "_private")() == "private"
    assert find_method(anything, collections.Counter("aab"), "most_common")(1) == [("a", 2)]
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        find_method(anything, Stored(), "missing")
    with pytest.raises(NameRefusedError, match="is not a method"):
        find_method(anything, Stored(), "__dict__")


def test_usual_methods_of_tensors_modules_optimizers_and_containers_are_found():
    tensor = torch.ones(2, 2)
    assert find_method(rule(), tensor, "add")(1).sum() == 8
    assert find_method(rule(), tensor, "add_")(1) is tensor
    assert find_method(rule(), tensor, "size")() == torch.Size([2, 2])
    assert find_method(rule(), tensor, "view")(1, 4).shape == (1, 4)
    module = torch.nn.Linear(2, 1)
    assert find_method(rule(), module, "__call__")(tensor).shape == (2, 1)
    assert find_method(rule(), module, "forward")(tensor).shape == (2, 1)
    assert find_method(rule(), module, "state_dict")().keys() == {"weight", "bias"}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    find_method(rule(), optimizer, "zero_grad")()
    find_method(rule(), optimizer, "step")()
    assert find_method(rule(), [1], "append")(2) is None
    assert find_method(rule(), {"a": 1}, "__getitem__")("a") == 1
