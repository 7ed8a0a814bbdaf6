"""The style and the script of the page."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root{color-scheme:light dark;--back:#fff;--panel:#f6f7f9;--text:#1b1f24;--soft:#5b6470;--line:#d9dde3;
--native:#1a7f74;--chosen:#d98a00;--eager:#d1242f;--by_design:#8250df;--free:#c4cad2;--accent:#0b62c4;--fill:#0b62c422}
@media (prefers-color-scheme:dark){:root{--back:#0f1318;--panel:#181d24;--text:#e6eaef;--soft:#99a3af;--line:#2d343d;
--native:#3fb8aa;--chosen:#f0ad3e;--eager:#ff6b6b;--by_design:#b392f0;--free:#4a525c;--accent:#6cb2ff;--fill:#6cb2ff22}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1240px;background:var(--back);color:var(--text);
font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:20px;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;margin:28px 0 8px}h3{font-size:14px;margin:14px 0 6px}
p{margin:4px 0 8px}.soft{color:var(--soft)}code{font:12px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:10px;margin:14px 0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px 12px;min-width:0}
.tile b{display:block;font-size:22px;line-height:1.25}.tile.bad{border-color:var(--eager)}
.tile.note{border-color:var(--chosen)}
.bar{display:flex;width:100%;height:8px;border-radius:4px;overflow:hidden;background:var(--line);margin:4px 0}
.bar i{display:block;min-width:1px}
.native{background:var(--native)}.chosen{background:var(--chosen)}.eager{background:var(--eager)}
.by_design{background:var(--by_design)}.free{background:var(--free)}.amount{background:var(--accent)}
.key{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12px}.key span::before,.place::before{content:"";
display:inline-block;
width:9px;height:9px;border-radius:2px;margin-right:5px;background:currentColor}
.place{white-space:nowrap}.t-native{color:var(--native)}.t-chosen{color:var(--chosen)}.t-eager{color:var(--eager)}
.t-by_design{color:var(--by_design)}.t-free{color:var(--soft)}
.wide{overflow-x:auto;max-width:100%}table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;color:var(--soft);font-weight:600;font-size:12px}
td,th{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td code{overflow-wrap:normal}
.card{border-left-width:4px}.c-eager{border-left-color:var(--eager)}.c-chosen{border-left-color:var(--chosen)}
.c-by_design{border-left-color:var(--by_design)}.count{font-size:18px}
.names{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.panel{background:var(--panel);border:1px solid var(--line);
border-radius:8px;padding:10px 12px;margin:8px 0;min-width:0}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:10px;align-items:start}
details{border-left:2px solid var(--line);margin:2px 0 2px 2px;padding-left:8px}
details.has-eager{border-color:var(--eager)}details.has-chosen{border-color:var(--chosen)}
summary{cursor:pointer;display:grid;grid-template-columns:minmax(0,1fr) 84px minmax(72px,auto);gap:8px;
align-items:center;padding:2px 0}
summary::before{content:none}summary .name::before{content:"▸ ";color:var(--soft)}
details[open]>summary .name::before{content:"▾ "}
summary .name{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
summary.plain{display:block}summary.plain::before{content:"▸ ";color:var(--soft)}
details[open]>summary.plain::before{content:"▾ "}
.ops{list-style:none;margin:0 0 4px;padding:0;font-size:12px}
.ops li{padding:2px 0 2px 12px;border-bottom:1px dotted var(--line);position:relative;overflow-wrap:anywhere}
.ops li::before{content:"";
position:absolute;left:0;top:7px;width:7px;height:7px;border-radius:2px;background:currentColor}
.ops li>*{color:var(--text)}.ops .soft{color:var(--soft)}.hide{display:none}
svg{display:block;width:100%;height:220px}.chart{position:relative}
.curve{fill:none;stroke:var(--accent);stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.area{fill:var(--fill)}.grid{stroke:var(--line);vector-effect:non-scaling-stroke}
.half{stroke:var(--soft);stroke-dasharray:4 4;vector-effect:non-scaling-stroke}
.peak{stroke:var(--eager);stroke-dasharray:2 3;vector-effect:non-scaling-stroke}
.cursor{stroke:var(--text);vector-effect:non-scaling-stroke;visibility:hidden}
.strip{display:flex;height:18px;font-size:10px;line-height:18px;overflow:hidden;border-radius:4px;color:var(--text)}
.strip i{display:block;overflow:hidden;white-space:nowrap;font-style:normal;text-align:center;min-width:0;flex-basis:0}
.strip i:nth-child(odd){background:var(--line)}.strip i:nth-child(even){background:var(--free)}
.strip.places{height:7px;margin:2px 0}.strip.places i.native{background:var(--native)}
.strip.places i.chosen{background:var(--chosen)}.strip.places i.eager{background:var(--eager)}
.strip.places i.by_design{background:var(--by_design)}.strip.places i.free{background:var(--free)}
.ends{display:flex;justify-content:space-between;gap:8px;font-size:12px;color:var(--soft)}
.read{min-height:2.9em;font-size:12px}.share{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:0 10px;
margin:4px 0}.share .bar{grid-column:1/3;margin:2px 0}.share .line{grid-column:1/3;font-size:12px;
white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
input{font:inherit;padding:5px 9px;width:100%;max-width:380px;border:1px solid var(--line);border-radius:6px;
background:var(--back);color:var(--text)}
.flow{display:inline-flex;align-items:center;gap:6px;white-space:nowrap}
@media (max-width:600px){table{min-width:640px}
body{padding:10px}.tiles{grid-template-columns:1fr 1fr}.tile b{font-size:18px}
.tile:first-child{grid-column:1/3}svg{height:160px}summary{grid-template-columns:minmax(0,1fr) 48px 64px}}
"""

SCRIPT = """
(function(){
var data=document.getElementById('memory');
if(data){
  var points=JSON.parse(data.textContent),chart=document.querySelector('.chart'),read=document.getElementById('read');
  var cursor=chart.querySelector('.cursor');
  function show(event){
    var box=chart.getBoundingClientRect(),at=Math.floor((event.clientX-box.left)/box.width*points.length);
    at=Math.max(0,Math.min(points.length-1,at));
    var x=(at+0.5)/points.length*1000;
    cursor.setAttribute('x1',x);cursor.setAttribute('x2',x);cursor.style.visibility='visible';
    read.textContent=points[at];
  }
  chart.addEventListener('pointermove',show);chart.addEventListener('pointerdown',show);
}
var find=document.getElementById('find');
if(find){
  find.addEventListener('input',function(){
    var asked=find.value.toLowerCase();
    document.querySelectorAll('.tree').forEach(function(tree){
      tree.querySelectorAll('li').forEach(function(one){
        one.classList.toggle('hide',asked!==''&&one.textContent.toLowerCase().indexOf(asked)<0);
      });
      tree.querySelectorAll('details').forEach(function(one){
        var has=one.querySelector('li:not(.hide)')!==null;
        one.classList.toggle('hide',!has);
        if(asked!==''){one.open=has;}
      });
    });
  });
}
})();
"""
