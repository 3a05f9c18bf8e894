// SPDX-License-Identifier: Apache-2.0
// steadynorm::group_norm as a Python function, for every CPython from 3.10 on: the limited API alone.
// The binding of torch.ops looks for overrides, boxes each argument by the schema and unboxes the result:
// 0.8 of 2.2 us for 128 values (CPU, 2026-12-01). Here the operator is called as C++ calls it, where
// every argument is of the very type that the schema names. All else, and so every rule and every sentence
// about arguments, is the binding's.
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>

#include <exception>
#include <optional>
#include <string_view>
#include <utility>

// PyTorch's own, whose headers need more than the limited API. A changed signature does not link.
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace steadynorm::python {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDType = std::optional<at::ScalarType>;

// How PyTorch lays out a torch.Tensor and a torch.dtype. `learn` tries it before anything relies on it.
struct PyTensor {
  PyObject head;
  Tensor value;
};
struct PyDType {
  PyObject head;
  at::ScalarType value;
};

const Tensor& tensor_of(PyObject* object) { return reinterpret_cast<PyTensor*>(object)->value; }
at::ScalarType dtype_of(PyObject* object) { return reinterpret_cast<PyDType*>(object)->value; }

PyTypeObject *tensor_type, *parameter_type, *dtype_type;

PyObject* attribute(const char* module, const char* name) {
  PyObject* imported = PyImport_ImportModule(module);
  PyObject* found = imported == nullptr ? nullptr : PyObject_GetAttrString(imported, name);
  Py_XDECREF(imported);
  return found;
}

// The types, kept for good. False, and an error is set: PyTorch's objects are not what is written above.
bool learn() {
  Tensor made(at::detail::empty_cpu({0}, at::kBFloat16, /*pin_memory=*/false, std::nullopt));
  const void* implementation = made.unsafeGetTensorImpl();
  PyObject* tensor = THPVariable_Wrap(std::move(made));
  PyObject* dtype = attribute("torch", "bfloat16");
  tensor_type = reinterpret_cast<PyTypeObject*>(attribute("torch", "Tensor"));
  parameter_type = reinterpret_cast<PyTypeObject*>(attribute("torch.nn.parameter", "Parameter"));
  bool known = tensor != nullptr && dtype != nullptr && tensor_type != nullptr && parameter_type != nullptr;
  if (known) {
    dtype_type = Py_TYPE(dtype);
    known = Py_TYPE(tensor) == tensor_type && tensor_of(tensor).unsafeGetTensorImpl() == implementation &&
            dtype_of(dtype) == at::kBFloat16;
    if (!known)
      PyErr_SetString(PyExc_ImportError, "torch.Tensor and torch.dtype are laid out in another way");
  }
  Py_XDECREF(tensor);
  Py_XDECREF(dtype);
  return known;
}

bool is_tensor(PyObject* object) {
  return Py_TYPE(object) == tensor_type || Py_TYPE(object) == parameter_type;
}
bool is_tensor_or_none(PyObject* object) { return object == Py_None || is_tensor(object); }

OptionalTensor optional_tensor(PyObject* object) {
  return object == Py_None ? std::nullopt : OptionalTensor(tensor_of(object));
}

// Other threads of Python run meanwhile, as under torch.ops.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() { PyEval_RestoreThread(state_); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* state_;
};

const auto& group_norm_operator() {
  using Signature = Tensor(const Tensor&, std::int64_t, const OptionalTensor&, const OptionalTensor&, double,
                           std::string_view, OptionalDType);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("steadynorm::group_norm", "").typed<Signature>();
  return op;
}

PyObject* through_binding(PyObject* binding, PyObject* const* arguments, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (tuple == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(arguments[i]);
    PyTuple_SetItem(tuple, i, arguments[i]);
  }
  PyObject* result = PyObject_Call(binding, tuple, nullptr);
  Py_DECREF(tuple);
  return result;
}

// (input, num_groups, weight, bias, eps, activation, out_dtype) -> output; `binding` is torch.ops' function.
PyObject* group_norm(PyObject* binding, PyObject* const* arguments, Py_ssize_t count) {
  const bool exact = count == 7 && is_tensor(arguments[0]) && Py_TYPE(arguments[1]) == &PyLong_Type &&
                     is_tensor_or_none(arguments[2]) && is_tensor_or_none(arguments[3]) &&
                     Py_TYPE(arguments[4]) == &PyFloat_Type &&
                     (arguments[6] == Py_None || Py_TYPE(arguments[6]) == dtype_type);
  // A mode of Python's sees the call before the operator does.
  if (!exact || at::impl::torch_function_mode_enabled()) return through_binding(binding, arguments, count);

  const long long num_groups = PyLong_AsLongLong(arguments[1]);
  Py_ssize_t length = 0;
  const char* activation = PyUnicode_AsUTF8AndSize(arguments[5], &length);
  if (activation == nullptr || (num_groups == -1 && PyErr_Occurred() != nullptr)) {
    PyErr_Clear();
    return through_binding(binding, arguments, count);
  }
  try {
    // Owned, and taken while Python's lock is held: a first reference beside Python's own would take the lock
    // again later on.
    const Tensor input = tensor_of(arguments[0]);
    const OptionalTensor weight = optional_tensor(arguments[2]), bias = optional_tensor(arguments[3]);
    const double eps = PyFloat_AsDouble(arguments[4]);
    const OptionalDType out_dtype =
        arguments[6] == Py_None ? std::nullopt : OptionalDType(dtype_of(arguments[6]));
    Tensor output = [&] {
      const Released released;
      return group_norm_operator().call(input, num_groups, weight, bias, eps,
                                        {activation, static_cast<std::size_t>(length)}, out_dtype);
    }();
    return THPVariable_Wrap(std::move(output));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// PyCFunction's signature is that of the calling convention, whatever the method's flags say.
template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef group_norm_method{"group_norm", as_method(group_norm), METH_FASTCALL, nullptr};

PyObject* bind(PyObject*, PyObject* binding) {
  return PyCFunction_NewEx(&group_norm_method, binding, /*module=*/nullptr);
}

PyMethodDef methods[] = {
    {"bind", bind, METH_O, "torch.ops.steadynorm.group_norm.default, called without the schema's detour."},
    {},
};

PyModuleDef definition{
    PyModuleDef_HEAD_INIT, "steadynorm_python", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace steadynorm::python

PyMODINIT_FUNC PyInit_steadynorm_python() {
  return steadynorm::python::learn() ? PyModule_Create(&steadynorm::python::definition) : nullptr;
}
